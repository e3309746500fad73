"""`compare`: what it refuses, how it measures and summarizes, and what it prints and writes; no process is started."""

import contextlib
import io
import itertools
import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import lockstep
from lockstep import cli
from lockstep.errors import ConfigurationError, LockstepError, RankFailed
from lockstep.study.common import console, to_json
from lockstep.study.compare import benchmark
from lockstep.study.compare.benchmark import (
    choose,
    choose_steps,
    compare,
    measure_candidate,
    merge,
    order_of_round,
    split_layers,
    threads_of,
)
from lockstep.study.compare.comparison import footnotes, judge, number, tables, to_record, typical_step
from lockstep.telemetry.provenance import Provenance, commit_of, gather
from lockstep.telemetry.step_times import StepTimes
from tests.training import make_task
from tests.unit.study.compare.compare_planted import MIB, comparison, contender

# What is refused before a process is started.

TASK = """
import torch
import lockstep

task = lockstep.Task(
    model=lambda: torch.nn.Linear(2, 1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(8, 2)),
    loss=lambda model, batch: model(batch[0]).mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=4,
)
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Give ``refused(*args)``: the message with which the command ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.launcher.api.launch", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    (tmp_path / "mine.py").write_text(TASK)

    def run(*args):
        assert cli.main(["compare", *args]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.py"], "none.py does not exist.\nName a Python file that has a lockstep.Task."),
        (["mine.py", "--devices", "0"], "devices=0 is not allowed.\nGive a whole number of at least 1."),
        (
            ["mine.py", "--strategies", "ddp,fsdp"],
            "There is no strategy 'fsdp'.\nChoose from: single, torch-dp, dp, torch-ddp, ddp, ddp-zero1, ddp-local-bn.",
        ),
        (["mine.py", "--rounds", "0"], "rounds=0 is not allowed.\nGive a whole number of at least 1."),
        (["mine.py", "--steps", "0"], "steps=0 is not allowed.\nGive a whole number of at least 1."),
        (["mine.py", "--warmup", "0"], "warmup=0 is not allowed.\nGive a whole number of at least 1."),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(refused, args, message):
    assert refused(*args) == f"lockstep: {message}\n"


def test_a_file_that_cannot_be_written_is_refused_before_minutes_are_spent(refused, tmp_path):
    assert refused("mine.py", "--json", "no/figures") == (
        "lockstep: no/figures cannot be written: No such file or directory.\nName another file.\n"
    )
    (tmp_path / "folder").mkdir()
    assert refused("mine.py", "--html", "folder") == (
        "lockstep: folder cannot be written: Is a directory.\nName another file.\n"
    )


def test_a_file_that_could_be_written_is_left_as_it_was(refused, tmp_path):
    (tmp_path / "old.json").write_text("old")
    refused("mine.py", "--rounds", "0", "--json", "old.json", "--html", "new.html")
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new.html").exists()


def test_more_devices_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("lockstep.launcher.api.launch", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError) as caught:
        compare(make_task(), devices=2)
    assert str(caught.value) == (
        "2 devices were requested, but this machine has 1 GPU.\n"
        "Request at most 1, or hide the GPUs to use the CPU, as with CUDA_VISIBLE_DEVICES= ."
    )


@pytest.mark.parametrize("cause", [ConfigurationError("The batch is empty."), KeyError("boom")])
def test_what_ranks_found_wrong_with_the_task_comes_without_a_traceback(monkeypatch, cause):
    def launch(*_, **__):
        raise RankFailed("Rank 1 failed:\nTraceback ...") from cause

    monkeypatch.setattr("lockstep.launcher.api.launch", launch)
    with pytest.raises(LockstepError) as caught:
        compare(make_task())
    assert str(caught.value) == (
        "The batch is empty." if isinstance(cause, ConfigurationError) else "Rank 1 failed:\nTraceback ..."
    )


# Who takes part, with how many threads, in which order, for how long.


def test_single_takes_part_always_and_torchs_data_parallel_not_on_cpus():
    assert choose(["ddp", "dp"], cuda=False) == (("single", "dp", "ddp"), ())
    assert choose(benchmark.STRATEGIES, cuda=False) == (
        ("single", "dp", "torch-ddp", "ddp"),
        ({"strategy": "torch-dp", "reason": "torch.nn.DataParallel does nothing on CPUs; ours runs there, as dp."},),
    )
    assert choose(benchmark.STRATEGIES, cuda=True) == (benchmark.STRATEGIES, ())


def test_all_cores_go_to_one_process_and_equal_parts_to_several():
    assert [threads_of(name, 8, 4) for name in benchmark.STRATEGIES] == [8, 8, 8, 2, 2]
    assert threads_of("ddp", 2, 4) == 1


def test_every_contender_follows_every_other_about_as_often():
    names = ["single", "dp", "torch-ddp", "ddp"]
    orders = [order_of_round(names, index) for index in range(8)]
    assert all(sorted(order) == sorted(names) for order in orders)
    follows = [pair for order in orders for pair in itertools.pairwise(order)]
    assert follows.count(("torch-ddp", "ddp")) == follows.count(("ddp", "torch-ddp")) == 3
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        ([0.1, 0.01], 50),  # half a second of the faster
        ([1.0, 0.01], 5),  # no more than five seconds of the slower
        ([30.0, 20.0], 3),
        ([1e-5, 1e-5], 500),
    ],
)
def test_a_turn_is_long_for_the_fastest_and_not_too_long_for_the_slowest(step_s, steps):
    assert choose_steps(step_s) == steps


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (nn.SyncBatchNorm(2), ()),
        (nn.Dropout(0.0), ()),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), ("dropout",)),
        (nn.Sequential(nn.BatchNorm2d(2), nn.Dropout2d()), ("batch norm", "dropout")),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), ()),
    ],
)
def test_layers_that_see_how_a_batch_is_split_are_found(layer, kinds):
    assert split_layers(layer) == kinds


# A turn of one rank, and what becomes of the turns of several.


class PlannedTrainer:
    """Steps take what is planned: backward is longer with synchronisation than without."""

    device = torch.device("cpu")
    devices = (device,)

    def __init__(self, with_sync_s, without_sync_s, *, exposed_s=None, accumulate=1):
        self.strategy, self.settings = SimpleNamespace(exposed_s=exposed_s), SimpleNamespace(accumulate=accumulate)
        self._planned_s = {True: list(with_sync_s), False: list(without_sync_s)}
        self._sync, self.calls = True, []

    def step(self):
        self.calls.append(self._sync)
        planned_s = self._planned_s[self._sync]
        backward_s = planned_s.pop(0) if len(planned_s) > 1 else planned_s[0]
        times = StepTimes(total_s=0.7, data_wait_s=0.1, forward_s=0.2, backward_s=backward_s + 0.01, optimizer_s=0.4)
        return SimpleNamespace(times=times, num_samples=8, loss=torch.tensor(float(len(self.calls))))

    @contextlib.contextmanager
    def without_sync(self):
        self._sync = False
        yield
        self._sync = True


def measure(trainer, name, num_steps):
    return measure_candidate(trainer, name, num_steps, 4, 1)


def test_exposed_communication_is_what_synchronisation_adds_to_the_median_backward():
    # A single slow step, with or without synchronisation, is noise and moves no median.
    turn, _ = measure(PlannedTrainer([3.0, 3.0, 99.0, 3.0, 3.0], [2.0, 50.0, 2.0]), "ddp", 5)
    assert turn.times.exposed_s == pytest.approx(1.0)


def test_steps_without_synchronisation_come_last_and_count_for_nothing_else():
    trainer = PlannedTrainer([3.0], [2.0])
    turn, losses = measure(trainer, "torch-ddp", 12)
    assert trainer.calls == [True] * 12 + [False] * 4
    assert turn.num_samples == 12 * 8
    assert [float(loss) for loss in losses] == list(range(1, 13))
    assert (turn.round, turn.place) == (4, 1)
    times = turn.times
    assert (times.data_wait_s, times.forward_s, times.optimizer_s) == pytest.approx((0.1, 0.2, 0.4))
    # The wait for the sum of the losses is communication, too.
    assert times.backward_s + times.exposed_s == pytest.approx(3.01)
    assert times.total_s == turn.seconds / 12


def test_all_see_the_same_samples_so_single_runs_the_steps_without_synchronisation_too():
    trainer = PlannedTrainer([3.0], [2.0])
    assert measure(trainer, "single", 3)[0].times.exposed_s is None
    assert trainer.calls == [True] * 3 + [False] * 3


def test_an_engine_that_times_its_exchange_is_believed_on_the_cpu(monkeypatch):
    turn, _ = measure(PlannedTrainer([3.0], [2.0], exposed_s=0.25, accumulate=4), "dp", 3)
    assert turn.times.exposed_s == pytest.approx(1.0)  # it measures one micro-batch of four
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    trainer = PlannedTrainer([3.0], [2.0], exposed_s=0.25)
    trainer.device = torch.device("cuda", 0)
    assert measure(trainer, "dp", 3)[0].times.exposed_s is None  # by the host's clock


def test_merging_takes_the_slowest_ranks_wall_time_and_the_mean_of_the_parts():
    fast = contender("ddp", 10.0, noise=(1.0,), exposed_ms=1.0).turns[0]
    slower = replace(fast.times, total_s=0.02, forward_s=fast.times.forward_s + 0.004, exposed_s=0.003)
    (merged,) = merge([[fast], [replace(fast, seconds=0.2, times=slower)]])
    assert (merged.seconds, merged.times.total_s) == (0.2, 0.02)
    assert merged.times.forward_s == pytest.approx(fast.times.forward_s + 0.002)
    assert merged.times.exposed_s == pytest.approx(0.002)
    assert merged.num_samples == fast.num_samples  # of the global batch already
    assert merge([[replace(fast, energy_j=1.0)], []]) == (replace(fast, energy_j=1.0),)  # a rank that only waited


# The figures of a candidate.


def test_step_time_takes_exposed_communication_out_of_backward():
    step = contender("ddp", 10.0, noise=(1.0, 1.0, 1.0), exposed_ms=2.0).step
    assert step.total_s == pytest.approx(0.010)
    assert (step.forward_s, step.backward_s, step.exposed_s) == pytest.approx((0.002, 0.004, 0.002))
    assert sum(step.parts().values()) == pytest.approx(0.010)


def test_what_no_part_accounts_for_is_other():
    turn = contender("single", 10.0).turns[0]
    turn = replace(turn, times=replace(turn.times, forward_s=0.001))
    assert typical_step((turn,)).other_s == pytest.approx(0.0015)


@pytest.mark.parametrize(("exposed_s", "shown_s"), [(-0.001, 0.0), (0.5, 0.005)])
def test_noise_in_exposed_communication_stays_within_backward(exposed_s, shown_s):
    turn = contender("ddp", 10.0).turns[0]
    step = typical_step((replace(turn, times=replace(turn.times, backward_s=0.005 - exposed_s, exposed_s=exposed_s)),))
    assert step.exposed_s == pytest.approx(shown_s)
    assert step.backward_s + step.exposed_s == pytest.approx(0.005)


def test_speed_over_another_is_paired_by_round():
    hit = (1.0, 4.0, 1.0, 1.0, 1.0)
    found = comparison(contender("single", 20.0, noise=hit), contender("ddp", 10.0, noise=hit))
    assert (found.contenders[1].speed_up.low, found.contenders[1].speed_up.high) == pytest.approx((2.0, 2.0))


def test_the_speed_up_is_the_ratio_of_the_samples_per_second_beside_it():
    # The median of the rounds' ratios is 1.25: the two have their slow rounds at different times.
    single = contender("single", 10.0, noise=(1.0, 1.0, 1.0, 2.0, 2.0))
    found = comparison(single, contender("ddp", 8.0, noise=(1.0, 2.0, 2.0, 1.6, 1.0)))
    ddp = found.contenders[1]
    assert (found.single.samples_per_s.median, ddp.samples_per_s.median) == pytest.approx((6400.0, 5000.0))
    # Rounded as in the table: 5000 / 6400, and half of it.
    assert (ddp.speed_up.median, ddp.efficiency) == (0.78, 0.39)
    assert (ddp.speed_up.low, ddp.speed_up.high) == (0.62, 2.5)
    (_, speed_row), _ = (table.rows for table in tables(found))
    assert speed_row[:4] == ("ddp", "5,000", "0.78x", "0.62 - 2.50")
    assert record(single, ddp)["contenders"][1]["speed_up"]["median"] == 0.78


def test_the_range_of_a_speed_up_reaches_as_far_as_the_speed_up():
    # Of nine rounds, the lowest and the highest ratio do not count, but one slow round moves the median.
    rounds = (1.1, 1.2, 1.3, 1.4, 2.4, 2.5, 2.6, 2.7)
    single, ddp = contender("single", 10.0, noise=(1.0, *rounds)), contender("ddp", 10.0, noise=(3.0, *rounds))
    gain = comparison(single, ddp).contenders[1].speed_up
    assert (gain.median, gain.low, gain.high) == (0.58, 0.58, 1.0)  # 1.4 / 2.4


def test_the_footnotes_name_the_statistics():
    assert footnotes(comparison(contender("single", 20.0)))[0] == (
        "Samples/s and times: medians of the rounds. Speed-up: samples/s over single's. Low - high: the range of the "
        "speed-up within a round, in which all take turns, with 90% certainty (sign test; from 5 rounds on). "
        "Exposed: communication that backward does not hide (backward with synchronisation less backward without; for "
        "dp, copying weights and gradients). Core wait: other programs or threads had the core. Other: Python between "
        "the parts, and what the medians of the parts do not add up to."
    )


# The tables, for a terminal.


def planted():
    # Rates of six digits, memory of five.
    fast = {"peak_bytes": (80_000 * MIB, 79_000 * MIB)}
    return comparison(
        contender("single", 0.2, peak_bytes=(20_000 * MIB,)),
        contender("dp", 0.12, exposed_ms=0.01, **fast),
        contender("torch-ddp", 0.115, exposed_ms=0.02, losses=(2.0, 1.00001), **fast),
        contender("ddp", 0.11, exposed_ms=0.01, data_ms=0.02, losses=(2.0, 0.9), **fast),
        left_out=[{"strategy": "torch-dp", "reason": "it does nothing on CPUs."}],
    )


def text_of(found, width):
    stream = io.StringIO()
    terminal = Console(file=stream, width=width, force_terminal=False, highlight=False)
    terminal.print(replace(found, verdict=judge(found)))
    return stream.getvalue()


def test_the_tables_fit_80_columns_with_no_figure_cut():
    text = text_of(planted(), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["single", "320k", "1.00x", "-", "20,000", "1.0000", "-"] in rows
    assert ["dp", "533k", "1.67x", "1.67", "-", "1.67", "80,000", "1.0000", "0"] in rows
    assert ["torch-ddp", "557k", "1.74x", "1.74", "-", "1.74", "80,000", "1.0000", "+1.0e-05"] in rows
    assert ["single", "0.20", "0.00", "0.05", "0.10", "-", "0.05", "0.00", "0.00"] in rows
    assert ["ddp", "0.11", "0.02", "0.02", "0.04", "0.01", "0.02", "0.00", "0.00"] in rows
    assert "torch-dp was left out: it does nothing on CPUs." in text


def test_waiting_for_a_core_is_not_called_other():
    # Of 80 ms, the model's parts take 40, and 38 are a wait for a core.
    single, dp = contender("single", 20.0), contender("dp", 40.0, core_wait_ms=38.0)
    turns = tuple(replace(turn, times=replace(turn.times, total_s=turn.times.total_s + 0.040)) for turn in dp.turns)
    _, table = tables(comparison(single, replace(dp, turns=turns, single=single, num_devices=2)))
    assert table.columns[6:] == ("optimizer", "core\nwait", "other")
    assert table.rows[1] == ("dp", "80.00", "0.00", "10.00", "20.00", "-", "10.00", "38.00", "2.00")
    on_gpu = tuple(replace(turn, times=replace(turn.times, core_wait_s=None)) for turn in single.turns)
    _, table = tables(comparison(replace(single, turns=on_gpu, single=None, num_devices=2)))
    assert table.rows[0][-2:] == ("-", "0.00")


def test_steps_of_seconds_fit_80_columns():
    slow = {"exposed_ms": 1111.0, "data_ms": 1111.0}
    text = text_of(comparison(contender("single", 99_999.0), contender("torch-ddp", 88_888.0, **slow)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "99,999" in text


def test_a_pipe_gets_plain_text_of_100_columns(capsys):
    console().print(replace(planted(), verdict=judge(planted())))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "- Use ddp: 1.82x single's speed (1.82x to 1.82x)." in text
    assert 80 < max(map(len, text.splitlines())) <= 100


def test_long_sentences_hang_below_their_bullet():
    lines = text_of(planted(), 60).splitlines()
    verdict = lines[lines.index("Verdict") + 1 :]
    assert [line for line in verdict if not line.startswith(("- ", "  "))] == []


def test_the_footnotes_say_how_the_cores_were_shared_and_what_a_peak_is():
    found = comparison(contender("single", 20.0), contender("ddp", 11.0), device="cpu")
    assert footnotes(found)[1:] == [
        "The loss is that of step 55, on the same samples for all.",
        "Threads of each process or replica: single 2 (the faster of 1 and 2), ddp 2.",
        "Peak memory: growth of a fresh process's resident memory, of the fullest; dp has one for all replicas.",
    ]
    assert footnotes(comparison(contender("single", 20.0)))[-1] == (
        "Peak memory: most bytes that tensors held on the fullest device, in fresh processes."
    )
    unmeasured = comparison(contender("single", 20.0, peak_bytes=None), device="cpu")
    assert footnotes(unmeasured)[-1] == "Threads of each process or replica: single 2 (the faster of 1 and 2)."


def test_rates_have_about_three_figures():
    rates = (0.01234, 5.678, 99.9, 1234.5, 99_949.9, 123_456.0)
    assert [number(value) for value in rates] == ["0.0123", "5.68", "99.9", "1,234", "99.9k", "123k"]


# The JSON. Other programs read it: a key that goes or gets another meaning needs another version.

PROVENANCE = Provenance("2026-01-01T00:00:00+00:00", {"torch": "2.13.0"}, {"cpu": "any"}, {"lockstep": "abc"})
SPREAD_KEYS = {"median", "low", "high"}


def record(*contenders):
    found = comparison(*contenders)
    return json.loads(to_json(to_record(replace(found, verdict=judge(found)), PROVENANCE)))


def test_the_keys_of_the_json_stay():
    found = record(contender("single", 20.0), contender("ddp", 10.0, exposed_ms=1.0))
    assert set(found) == {"version", "setup", "provenance", "contenders", "left_out", "verdict"}
    assert found["version"] == 2
    assert set(found["setup"]) == {
        *("task", "command", "device", "num_devices", "num_cores", "busy_cores", "global_batch_size", "num_steps"),
        *("num_rounds", "num_warmup", "seed", "precision", "num_parameters", "single_threads", "split_layers", "price"),
        "norms_apart",
    }
    assert set(found["provenance"]) == {"when", "versions", "machine", "commits"}
    assert set(found["verdict"]) == {"use", "sentences"}
    ddp = found["contenders"][1]
    assert set(ddp) == {
        *("strategy", "num_threads", "samples_per_s", "speed_up", "efficiency", "step", "peak_bytes", "imbalance"),
        *("last_loss", "loss_difference", "turns", "losses"),
    }
    assert set(ddp["samples_per_s"]) == set(ddp["speed_up"]) == SPREAD_KEYS
    parts = {"data_wait_s", "forward_s", "backward_s", "exposed_s", "optimizer_s"}
    parts |= {"core_wait_s", "peers_s", "copy_s", "hidden_s"}
    assert set(ddp["step"]) == {"total_s", *parts, "other_s"}
    times = {"seconds", "step_s", "energy_j"}
    assert set(ddp["turns"][0]) == {"round", "place", "num_samples", *times, *parts}


def test_the_record_holds_raw_rounds_and_their_summary():
    found = record(contender("single", 20.0), contender("ddp", 10.0, exposed_ms=1.0, losses=(2.0, 1.5)))
    assert found["verdict"]["use"] == "ddp"
    ddp = found["contenders"][1]
    assert ddp["samples_per_s"]["median"] == pytest.approx(6400.0)
    assert (ddp["speed_up"]["median"], ddp["efficiency"]) == pytest.approx((2.0, 1.0))
    assert ddp["step"]["exposed_s"] == pytest.approx(0.001)
    assert (ddp["peak_bytes"], ddp["imbalance"]) == ([100 * MIB, 100 * MIB], 1.0)
    assert (ddp["last_loss"], ddp["loss_difference"], ddp["losses"]) == (1.5, 0.5, [2.0, 1.5])
    assert [turn["round"] for turn in ddp["turns"]] == [0, 1, 2, 3, 4]
    assert ddp["turns"][0]["seconds"] == pytest.approx(0.1)


def test_what_is_not_known_or_no_number_is_null():
    found = record(contender("single", 20.0, losses=(2.0, float("nan")), peak_bytes=None), contender("ddp", 10.0))
    single, ddp = found["contenders"]
    assert (single["losses"], single["peak_bytes"], single["imbalance"]) == ([2.0, None], None, None)
    assert ddp["loss_difference"] is None


def test_the_machine_and_the_versions_are_recorded():
    found = gather()
    assert {"lockstep", "torch", "python"} <= set(found.versions)
    assert {"os", "cpu", "cores", "memory", "load"} <= set(found.machine)
    assert found.versions["lockstep"] == lockstep.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found.when)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_the_task_is_recorded_with_a_mark_if_files_differ(tmp_path):
    task = tmp_path / "task.py"
    task.write_text("task = None\n")
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "task.py")
    git(tmp_path, "commit", "-q", "-m", "A task")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert gather(task).commits["task"] == commit
    task.write_text("task = 1\n")
    assert gather(task).commits["task"] == f"{commit}+"
