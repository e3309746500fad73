"""What `tune` writes: a file that `train` reads, and tables."""

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.study.common import Spread
from lockstep.study.tune import table
from lockstep.study.tune import tune as run_tuning
from lockstep.study.tune.candidates import Candidate
from lockstep.study.tune.effects import Effect
from lockstep.study.tune.open_stage import Result
from lockstep.study.tune.outcome import Check, Outcome
from lockstep.study.tune.progress import clock, describe
from lockstep.study.tune.text import as_file
from lockstep.train.settings import FitSettings, read_settings
from tests.training import make_task

WORKERS = Result("loading", Candidate({"workers": 2}), Effect.BITS, Spread(1.5, 1.4, 1.6), 5, kept=True)
BF16 = Result(
    "precision",
    Candidate({"precision": "bf16"}),
    Effect.ARITHMETIC,
    Spread(1.3, 1.2, 1.4),
    5,
    kept=False,
    why="offered: taken with --allow-precision",
)
SINGLE = Result(
    "strategy", Candidate({"strategy": "single"}), Effect.ROUNDING, None, 0, kept=False, why="KeyError: 'x'"
)
TOGETHER = Result("all together", Candidate({"workers": 2}), Effect.BITS, Spread(1.52, 1.41, 1.61), 9, kept=True)
OUTCOME = Outcome(
    task="mine.py",
    device="cpu",
    num_devices=2,
    num_cores=4,
    global_batch_size=64,
    start={"clip": 1.0},
    found={"clip": 1.0, "workers": 2},
    effect=Effect.BITS,
    results=(WORKERS, SINGLE, BF16, TOGETHER),
    skips=(("prefetch", "there are no loader processes"),),
    checks=(
        Check("Data wait is 40% of the step", "2 workers (--workers 2)", 1.6, False, Spread(1.5, 1.4, 1.6)),
        Check("Computing is 50%", "bf16 (--precision bf16)", 2.0, True, Spread(1.3, 1.2, 1.4)),
        Check("Rank 1 is slow", "looking at it", 1.2, False, None, "no setting to try"),
    ),
    total=Spread(1.52, 1.41, 1.61),
    memory="The largest micro-batch that fits has 32 samples.",
    notes=(),
    seconds=42.0,
)


def test_the_file_says_what_each_setting_gave_and_train_reads_it(tmp_path):
    text = as_file(OUTCOME, task_file="mine.py", file="tuned.toml", facts={"torch": "2.13"})
    assert text == (
        "# Written by lockstep tune: mine.py on 2 x cpu, global batch 64.\n"
        "# torch: 2.13\n"
        "# lockstep train mine.py --settings tuned.toml\n"
        "#\n"
        "# All of it together: 1.52 times the samples/s (1.41 to 1.61) of the settings that tuning began with.\n"
        "# The training is the same, bit for bit.\n"
        "\n"
        "devices = 2\n"
        "\n"
        'strategy = "ddp"\n'
        "\n"
        "# as tuning began\n"
        "clip = 1.0\n"
        "\n"
        "# workers 2: 1.50 times the samples/s (1.40 to 1.60); training: same bits\n"
        "workers = 2\n"
        "\n"
        "# Faster, but not the same training:\n"
        "# precision bf16: 1.30 times the samples/s (1.20 to 1.40); offered: taken with --allow-precision\n"
        '# precision = "bf16"\n'
    )
    (tmp_path / "tuned.toml").write_text(text)
    assert FitSettings(**read_settings(tmp_path / "tuned.toml")) == FitSettings(devices=2, clip=1.0, workers=2)


def test_nothing_found_leaves_what_there_was(tmp_path):
    outcome = replace(OUTCOME, found=OUTCOME.start, total=Spread(1.01, 0.9, 1.1))
    text = as_file(outcome, task_file="mine.py", file="tuned.toml", facts={})
    assert "# Nothing that was tried is faster than the settings that tuning began with.\n" in text
    (tmp_path / "tuned.toml").write_text(text)
    assert read_settings(tmp_path / "tuned.toml") == {"devices": 2, "strategy": "ddp", "clip": 1.0}
    single = replace(OUTCOME, start={"strategy": "single"}, found={"strategy": "single"})
    assert "devices = 1\n" in as_file(single, task_file="mine.py", file="tuned.toml", facts={})


def shown(outcome, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width).print(table.render(outcome))
    return stream.getvalue()


def test_the_tables_have_what_was_kept_what_was_not_and_how_far_advice_was_off():
    lines = [" ".join(line.split()) for line in shown(OUTCOME).splitlines()]
    assert lines[0] == "mine.py: 2 x cpu, global batch 64, from strategy ddp, clip 1; 42 s"
    assert "loading workers 2 1.50x 1.40 - 1.60 5 same bits kept" in lines
    assert any(line.startswith("strategy strategy single - - 0 rounding KeyError: 'x'") for line in lines)
    assert "2 workers (--workers 2) 1.60x 1.50x (1.40 - 1.60) +7%" in lines
    assert "bf16 (--precision bf16) at most 2.00x 1.30x (1.20 - 1.40) held" in lines
    assert any(line.startswith("looking at it 1.20x - no setting to try") for line in lines)
    assert "prefetch: there are no loader processes" in lines
    assert lines[-2:] == [
        "All of it together: 1.52 times the samples/s (1.41 to 1.61) of the settings that tuning began with.",
        "The training is the same, bit for bit.",
    ]
    assert max(len(line) for line in shown(OUTCOME, 100).splitlines()) <= 100


def test_what_is_shown_while_it_goes_on():
    assert describe({}) == "starting"
    mark = {"stage": "loading", "name": "workers 2", "round": 2, "over": 1, "stages": 9}
    assert describe(mark) == "loading: workers 2, round 3"
    assert describe({**mark, "name": "now", "round": 0}) == "loading"
    assert (clock(61.4), clock(-3)) == ("1:01", "0:00")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"devices": 0}, "devices=0 is not allowed.\nGive a whole number of at least 1."),
        ({"minutes": 0}, "minutes=0 is not allowed.\nGive a number above 0."),
        (
            {"strategies": ["ddp", "torch-ddp"]},
            "There is no strategy 'torch-ddp' to try.\nChoose from: single, dp, ddp, ddp-zero1, fsdp.",
        ),
        (
            {"start": {"strategy": "torch-ddp"}},
            "Tuning cannot begin with strategy torch-ddp.\nChoose from: single, dp, ddp, ddp-zero1, fsdp.",
        ),
        (
            {"devices": 5},
            "The global batch of 24 samples does not divide by 5 devices.\nSet the global batch size to 20 or 25.",
        ),
        ({"start": {"workers": -1}}, "workers=-1 is not allowed.\nGive a whole number of at least 0, or auto."),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_starts(monkeypatch, how, text):
    monkeypatch.setattr("lockstep.study.tune.organise.launch_with", lambda *_, **__: pytest.fail("processes started"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigurationError) as error:
        run_tuning(make_task(), **how)
    assert str(error.value) == text


def test_a_file_of_somebody_elses_is_left_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow-tuned.toml").write_text("workers = 3\n")
    assert main(["tune", "some/slow.py", "--devices", "2"]) == 1
    assert capfd.readouterr().err == (
        "lockstep: slow-tuned.toml is there already, and lockstep tune has not written it.\n"
        "Name another file (--out FILE).\n"
    )


def test_the_command_hands_over_what_it_was_told_and_writes_the_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    told = []

    def tune(task, **how):
        told.append((task, how))
        return replace(OUTCOME, interrupted=True)

    monkeypatch.setattr("lockstep.study.tune.tune", tune)
    (tmp_path / "start.toml").write_text("workers = 3\ndevices = 2\n")
    (tmp_path / "out.toml").write_text("# Written by lockstep tune: before")
    flags = ["--settings", "start.toml", "--minutes", "2", "--strategies", "ddp, dp", "--global-batch-size", "32"]
    assert main(["tune", "mine.py", *flags, "--allow-precision", "--out", "out.toml"]) == 130
    ((task, how),) = told
    assert how.pop("began_at") <= time.time()
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
