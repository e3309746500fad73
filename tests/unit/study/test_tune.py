"""`tune`: what it tries, how it judges, and what it writes; no process is started."""

import io
import time
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from lockstep.cli import main
from lockstep.errors import ConfigurationError, LockstepError, RankFailed
from lockstep.study import tune as tuning
from lockstep.study.common import Spread
from lockstep.study.tune import Effect, Result, Sweep, candidates
from lockstep.train.settings import FitSettings, read_settings
from tests.training import make_task

FASTER = Spread(1.5, 1.4, 1.6)
RESULTS = (
    Result("loading", {"workers": 2}, Effect.BITS, FASTER, 5),
    Result("strategy", {"strategy": "single"}, Effect.ROUNDING, None, 0, why="KeyError: 'x'"),
    Result("precision", {"precision": "bf16"}, Effect.ARITHMETIC, FASTER, 5, why="offered: use --allow-precision"),
    Result("all together", {"workers": 2}, Effect.BITS, Spread(1.52, 1.41, 1.61), 9),
)
OUTCOME = Sweep(
    name="mine.py on 2 x cpu",
    task="mine.py",
    num_devices=2,
    num_cores=4,
    global_batch_size=64,
    strategies=("single", "dp", "ddp"),
    seconds=300.0,
    until=time.time() + 300,
    start=FitSettings(clip=1.0),
    found=FitSettings(clip=1.0, workers=2),
    results=RESULTS,
    total=Spread(1.52, 1.41, 1.61),
    notes=["Stopped by Ctrl-C: this was found until then."],
)


@pytest.mark.parametrize(
    ("stage", "base", "wait_share", "found"),
    [
        ("loading", {}, 0.4, [{"workers": 1}, {"workers": 2}, {"workers": 4}]),
        ("loading", {"workers": 4}, 0.4, [{"workers": 2}, {"workers": 8}]),
        ("loading", {}, 0.01, []),
        # As compare measures them: the whole batch at once, with all cores and with one thread.
        (
            "strategy",
            {},
            0.4,
            [{"strategy": "single"}, {"strategy": "single", "threads": 1}, {"strategy": "dp"}],
        ),
        ("strategy", {"threads": 2}, 0.4, [{"strategy": "single"}, {"strategy": "dp"}]),
        ("strategy", {"strategy": "single", "accumulate": 2}, 0.4, [{"strategy": "dp"}]),
        ("micro-batch", {}, 0.4, [{"accumulate": 2}, {"accumulate": 4}]),
        ("micro-batch", {"accumulate": 4}, 0.4, [{"accumulate": count} for count in (2, 8, 16)]),
        ("micro-batch", {"accumulate": 8}, 0.4, [{"accumulate": count} for count in (4, 16)]),
        ("micro-batch", {"reproducible": 2}, 0.4, []),
        ("threads", {}, 0.4, [{"threads": 1}, {"threads": 4}]),
        ("precision", {}, 0.4, [{"precision": "bf16"}, {"compression": "bf16"}]),
    ],
)
def test_what_is_tried(stage, base, wait_share, found):
    strategies = ("dp",) if base.get("strategy") == "single" else OUTCOME.strategies
    sweep = replace(OUTCOME, strategies=strategies, found=FitSettings(**base), wait_share=wait_share)
    assert candidates(stage, sweep) == found


@pytest.mark.parametrize(
    ("after", "layers", "effect"),
    [
        ({"workers": 2}, ("dropout",), Effect.BITS),
        ({"accumulate": 2}, (), Effect.ROUNDING),
        ({"accumulate": 2}, ("batch norm",), Effect.DIVISION),
        ({"strategy": "ddp-zero1"}, ("batch norm",), Effect.ROUNDING),
        ({"strategy": "dp"}, ("dropout",), Effect.DIVISION),
        ({"precision": "bf16"}, (), Effect.ARITHMETIC),
    ],
)
def test_what_becomes_of_the_training(after, layers, effect):
    sweep = replace(OUTCOME, layers=layers)
    assert sweep.effect_of(FitSettings(), FitSettings(**after)) is effect


@pytest.mark.parametrize(
    ("ratio", "rounds", "why"),
    [
        (FASTER, 5, ""),
        (FASTER, 4, "time was up after 4 rounds"),
        (Spread(1.01, 1.005, 1.02), 9, "too little to matter"),
        (Spread(1.1, 0.9, 1.3), 9, "within the noise"),
        (Spread(0.9, 0.8, 0.95), 3, "slower"),
        (None, 0, "time was up before it ran"),
    ],
)
def test_what_is_a_gain(ratio, rounds, why):
    assert Result("loading", {"workers": 1}, Effect.BITS, ratio, rounds).why_no_gain == why


class Machine:
    """Stands for `run_ranks`: says at once what the ranks would have measured."""

    def __init__(self, speeds=None, fails=None):
        self.speeds, self.fails = speeds or {}, fails or {}
        self.stages = []

    def __call__(self, function, *args, devices, timeout_s):
        if function is tuning.probe:
            return [(("dropout",), 0.5)]
        (trial,) = args
        contenders = {name: settings for name, (_, settings) in trial.arms.items()}
        self.stages.append(list(contenders))
        for name in contenders:
            if name in self.fails:
                raise self.fails[name]
        return [{name: [1 / self.speed(values)] * 9 for name, values in contenders.items()}]

    def speed(self, values):
        speed = 1.0
        for name, value in asdict(values).items():
            speed *= self.speeds.get((name, value), 1.0)
        return speed


def tune(monkeypatch, machine, **how):
    monkeypatch.setattr(tuning, "run_ranks", machine)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    return tuning.tune(make_task(), **how)


def test_what_is_faster_is_kept_stage_by_stage_and_confirmed_as_a_whole(monkeypatch):
    machine = Machine({("workers", 2): 1.5, ("workers", 4): 1.2, ("strategy", "dp"): 2.0, ("precision", "bf16"): 3.0})
    outcome = tune(monkeypatch, machine)
    assert outcome.found == FitSettings(workers=2)
    kept = {name: each.changes[name] for each in outcome.results if not each.why for name in each.changes}
    assert kept == {"workers": 2}
    assert outcome.total.median == 1.5
    why = {tuning.in_words(each.changes): each.why for each in outcome.results}
    assert why["workers 4"] == "another was better"
    assert why["strategy dp"] == "offered: divides batches in another way for dropout; use --allow-division"
    assert why["precision bf16"] == "offered: use --allow-precision"
    assert machine.stages[-1] == ["now", "workers 2"]
    outcome = tune(monkeypatch, machine, allow_precision=True, allow_division=True)
    assert outcome.found == FitSettings(strategy="dp", workers=2, precision="bf16")


def test_a_sum_that_is_no_gain_is_not_taken(monkeypatch):
    outcome = tune(monkeypatch, Machine({("workers", 2): 1.5}), strategies=["ddp"])
    assert outcome.found == FitSettings(workers=2)
    machine = Machine({("workers", 2): 1.5})
    machine.speed = lambda values: 1.5 if len(machine.stages) == 1 and values.workers == 2 else 1.0
    assert tune(monkeypatch, machine, strategies=["ddp"]).found == FitSettings()


def test_a_change_that_breaks_the_ranks_is_left_out(monkeypatch):
    error = RankFailed("rank 1 failed")
    error.__cause__ = KeyError("x")
    machine = Machine({("workers", 1): 1.5}, {"workers 4": error})
    outcome = tune(monkeypatch, machine, strategies=["ddp"])
    assert outcome.found == FitSettings(workers=1)
    assert [each.why for each in outcome.results if each.changes == {"workers": 4}] == ["KeyError: 'x'"]
    alone = [["now", f"workers {count}"] for count in (1, 2, 4)]
    assert machine.stages[:4] == [["now", "workers 1", "workers 2", "workers 4"], *alone]


def test_a_task_that_cannot_be_trained_ends_it(monkeypatch):
    def fail(*_, **__):
        raise ConfigurationError("There is no loss.")

    monkeypatch.setattr(tuning, "run_ranks", fail)
    with pytest.raises(LockstepError, match="There is no loss"):
        tuning.tune(make_task())


def test_ctrl_c_gives_what_was_found_by_then(monkeypatch):
    machine = Machine({("workers", 2): 1.5}, {"strategy dp": KeyboardInterrupt()})
    outcome = tune(monkeypatch, machine, strategies=["dp"])
    assert outcome.interrupted
    assert outcome.found == FitSettings(workers=2)
    assert outcome.notes[-1] == "Stopped by Ctrl-C: this was found until then."


def test_the_file_says_what_each_setting_gave_and_train_reads_it(tmp_path):
    text = tuning.as_file(OUTCOME, task_file="mine.py", file="tuned.toml", facts={"torch": "2.13"})
    assert text == (
        "# Written by lockstep tune: mine.py on 2 x cpu, global batch 64.\n"
        "# torch: 2.13\n"
        "# lockstep train mine.py --settings tuned.toml\n"
        "#\n"
        "# All changes together: 1.52 times the samples/s (1.41 to 1.61) of the settings at the start.\n"
        "# The training is the same, bit for bit.\n"
        "\n"
        "devices = 2\n"
        "\n"
        'strategy = "ddp"\n'
        "\n"
        "clip = 1.0\n"
        "\n"
        "# workers 2: 1.50 times the samples/s (1.40 to 1.60); training: same bits\n"
        "workers = 2\n"
    )
    (tmp_path / "tuned.toml").write_text(text)
    assert FitSettings(**read_settings(tmp_path / "tuned.toml")) == FitSettings(devices=2, clip=1.0, workers=2)


@pytest.mark.parametrize(("rounds", "seconds", "minutes"), [(3, 300, 10), (1, 40, 2)])
def test_what_seemed_faster_when_time_was_up_is_in_the_verdict(rounds, seconds, minutes):
    slower = Result("loading", {"workers": 2}, Effect.BITS, Spread(0.9, 0.8, 1.1), rounds)
    one = Result("strategy", {"strategy": "dp"}, Effect.ROUNDING, Spread(2.32, 0.9, 2.4), rounds)
    two = Result("precision", {"precision": "bf16"}, Effect.ARITHMETIC, Spread(3.0, 2.9, 3.1), 3)
    nothing = replace(OUTCOME, found=OUTCOME.start, total=None, results=[slower, one, two], seconds=seconds)
    seemed = "When time was up, these seemed faster: strategy dp 2.32 times as fast"
    again = f"run again with --minutes {minutes}."
    assert nothing.verdict == (
        "No allowed change is clearly faster than the settings at the start. "
        f"{seemed}; precision bf16 3.00 times as fast: {again}"
    )
    assert replace(OUTCOME, results=[*OUTCOME.results, one], seconds=seconds).verdict == (
        f"All changes together: 1.52 times the samples/s (1.41 to 1.61) of the settings at the start. {seemed}: {again}"
    )
    assert (
        replace(nothing, results=[slower]).verdict
        == "No allowed change is clearly faster than the settings at the start."
    )


def test_a_total_that_time_did_not_reach_is_not_a_change_that_seemed_faster():
    total = Result("all together", {"workers": 2}, Effect.BITS, Spread(1.5, 1.4, 1.6), 2, "time was up after 2 rounds")
    assert replace(OUTCOME, results=[*OUTCOME.results[:1], total], total=None).verdict == (
        "The total gain was not measured: time was up."
    )


def test_nothing_found_leaves_what_there_was(tmp_path):
    outcome = replace(OUTCOME, found=OUTCOME.start, total=Spread(1.01, 0.9, 1.1))
    text = tuning.as_file(outcome, task_file="mine.py", file="tuned.toml", facts={})
    assert "# No allowed change is clearly faster than the settings at the start.\n" in text
    (tmp_path / "tuned.toml").write_text(text)
    assert read_settings(tmp_path / "tuned.toml") == {"devices": 2, "strategy": "ddp", "clip": 1.0}


def test_the_table_has_what_was_kept_and_what_was_not():
    stream = io.StringIO()
    Console(file=stream, width=100).print(OUTCOME)
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert lines[0] == "mine.py on 2 x cpu, global batch 64, from strategy ddp, clip 1.0"
    assert "loading workers 2 1.50x 1.40 - 1.60 5 same bits kept" in lines
    assert any(line.startswith("strategy strategy single - - 0 rounding KeyError: 'x'") for line in lines)
    assert lines[-1] == "The training is the same, bit for bit."
    assert max(len(line) for line in stream.getvalue().splitlines()) <= 100


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"devices": 0}, "devices=0 is not allowed.\nGive a whole number of at least 1."),
        ({"minutes": 0}, "minutes=0 is not allowed.\nGive a number above 0."),
        (
            {"strategies": ["ddp", "torch-ddp"]},
            "There is no strategy 'torch-ddp' to tune.\nChoose from: single, dp, ddp, ddp-zero1, fsdp.",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_starts(monkeypatch, how, text):
    monkeypatch.setattr(tuning, "run_ranks", lambda *_, **__: pytest.fail("processes started"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    with pytest.raises(ConfigurationError) as error:
        tuning.tune(make_task(), **how)
    assert str(error.value) == text


def test_a_file_of_somebody_elses_is_left_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "slow.py").write_text("task = None\n")
    (tmp_path / "slow-tuned.toml").write_text("workers = 3\n")
    assert main(["tune", "some/slow.py", "--devices", "2"]) == 2
    assert capfd.readouterr().err == (
        "lockstep: slow-tuned.toml already exists, and lockstep tune did not write it.\n"
        "Name another file (--out FILE).\n"
    )


def test_the_command_hands_over_what_it_was_given_and_writes_the_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("task = None\n")
    calls = []

    def tune(task, **how):
        calls.append((task, how))
        return replace(OUTCOME, interrupted=True)

    monkeypatch.setattr(tuning, "tune", tune)
    (tmp_path / "start.toml").write_text("workers = 3\ndevices = 2\n")
    (tmp_path / "out.toml").write_text("# Written by lockstep tune: before")
    flags = ["--settings", "start.toml", "--minutes", "2", "--strategies", "ddp, dp", "--global-batch-size", "32"]
    assert main(["tune", "mine.py", *flags, "--allow-precision", "--out", "out.toml"]) == 130
    ((task, how),) = calls
    assert (task, how) == (
        "mine.py",
        {
            "devices": 2,
            "minutes": 2.0,
            "start": {"workers": 3, "devices": 2, "global_batch_size": 32},
            "strategies": ["ddp", "dp"],
            "allow_precision": True,
            "allow_division": False,
        },
    )
    assert capfd.readouterr().out.endswith("\nsettings written to out.toml\n")
    assert read_settings("out.toml") == {"devices": 2, "strategy": "ddp", "clip": 1.0, "workers": 2}
