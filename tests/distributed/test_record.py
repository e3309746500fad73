"""What `fit` records on every rank: steps as they were, whom all waited for, events; and what the report says of it."""

import os
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
from torch.utils.data import Dataset

import lockstep
from lockstep.base.record_files import open_locked
from lockstep.errors import ConfigurationError
from lockstep.study.report.figures import find_costs, find_window
from lockstep.study.report.view import sentences, view_run
from lockstep.telemetry import resources
from lockstep.telemetry.record import read_run
from tests.training import make_task, mean_loss, samples

NUM_STEPS = 24


class SlowSamples(Dataset):
    """The samples of other tests, each of which takes its time."""

    def __init__(self, seconds):
        self._samples, self._seconds = samples(), seconds

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, number):
        time.sleep(self._seconds)
        return self._samples[number]


def fit(world, folder, strategy="ddp", task=None, **settings):
    task = task or make_task()
    return lockstep.fit(task, strategy=strategy, quiet=True, run_dir=folder, **{"steps": NUM_STEPS, **settings})


def slow_on_rank_one(world, seconds=0.02):
    def loss(model, batch):
        if world.rank == 1:
            time.sleep(seconds)
        return mean_loss(model, batch)

    return loss


def test_every_rank_records_its_steps_and_what_it_waited_for(ranks, tmp_path):
    def train(world):
        task = make_task(loss=slow_on_rank_one(world), eval_dataset=samples)
        result = fit(world, tmp_path, task=task, checkpoint=tmp_path / "kept", checkpoint_every=10, clip=1.0)
        return result.losses

    losses, _ = ranks(2)(train)
    view = view_run(tmp_path)
    assert view.run.gaps == []
    for rank, record in view.run.ranks.items():
        assert [step.step for step in record.steps] == list(range(NUM_STEPS))
        assert [step.loss for step in record.steps] == losses
        assert all(step.grad_norm > 0 for step in record.steps)
        assert {step.learning_rate for step in record.steps} == {0.1}
        assert [timeline.step for timeline in record.timelines] == [4, 5, 6, 7]
        for step in record.steps:
            assert sum(step.times.parts().values()) == pytest.approx(step.times.total_s, abs=1e-6)
            assert step.times.other_s <= 0.02 * step.times.total_s + 0.0005
        assert record.machine[-1].figures["rss_bytes"] > 2**24
        kinds = [event.event for event in record.events if event.event in ("checkpoint", "evaluation", "end")]
        assert kinds[0] == "evaluation" and kinds[-1] == "end" and kinds.count("checkpoint") >= 2
        assert view.figures.by_rank[rank].forward_s > 0.02 * rank
    # Rank 1 is slow, so rank 0 waits for it and rank 1 for the wire alone.
    assert view.figures.straggler.rank == 1
    assert view.figures.by_rank[0].peers_s > 0.01 > view.figures.by_rank[1].peers_s
    assert view.advice[0].cause.startswith("Rank 1 is slow: it loses ")
    # A bucket's trip is that of the rank that sent it last.
    pairs = zip(*(record.timelines for record in view.run.ranks.values()), strict=True)
    buckets = [[timeline.buckets for timeline in pair] for pair in pairs]
    assert {len(each) for pair in buckets for each in pair} == {1}
    trips_s = [min(each.done_s - each.sent_s for (each,) in pair) for pair in buckets]
    assert min(trips_s) > 0 and median(trips_s) < 0.02  # not rank 1's delay; a busy machine may hold up one of them
    begins = [[step.time for step in record.steps] for record in view.run.ranks.values()]
    assert median(abs(one - other) for one, other in zip(*begins, strict=True)) < 0.2
    (session,) = view.run.sessions
    assert (session["task"], session["global_batch_size"], session["num_steps"]) == ("task", 24, NUM_STEPS)
    assert session["settings"]["clip"] == 1.0 and session["settings"]["run_dir"] == str(tmp_path)


def test_a_resumed_run_goes_on_in_its_files_and_a_fresh_one_keeps_them_aside(ranks, tmp_path):
    def train(world, steps):
        fit(world, tmp_path / "run", checkpoint=tmp_path / "kept", steps=steps)

    ranks(2)(train, 6)
    zero = (tmp_path / "run" / "rank-0.jsonl").read_text()
    (tmp_path / "run" / "rank-7.jsonl").write_text(zero[: zero.index("\n") + 1])
    ranks(2)(train, 9)
    run = read_run(tmp_path / "run")
    assert [[step.step for step in record.steps] for record in run.ranks.values()] == [list(range(9))] * 2
    assert [session["first_step"] for session in run.sessions] == [0, 6]
    assert [event.text for event in run.events if event.event == "resume"] == ["resumed after step 6"]

    def again(world):
        fit(world, tmp_path / "run", steps=3)

    ranks(2)(again)
    name, folder = run.sessions[0]["run"], tmp_path / "run"
    run = read_run(folder)
    assert (len(run.sessions), [len(record.steps) for record in run.ranks.values()]) == (1, [3, 3])
    assert sorted(each.name for each in folder.iterdir()) == [
        *(f"earlier-{name}", "rank-0.jsonl", "rank-1.jsonl", "run.json"),
    ]
    earlier = folder / f"earlier-{name}"
    assert (earlier / "rank-7.jsonl").exists()
    (earlier / "rank-7.jsonl").unlink()
    run = read_run(earlier)
    assert (len(run.sessions), [len(record.steps) for record in run.ranks.values()]) == (2, [9, 9])


def test_a_folder_in_which_another_run_is_recorded_is_refused_on_all_ranks(ranks, tmp_path):
    other = open_locked(tmp_path / "rank-0.jsonl")
    os.write(other, b"{}\n")

    def train(world):
        # A run with more ranks than the other one leaves nothing in its folder.
        with mock.patch.object(open_locked, "__kwdefaults__", {"wait_s": 0.1}):
            with pytest.raises(ConfigurationError) as error:
                fit(world, tmp_path, steps=3)
            return str(error.value)

    text = f"Rank 0: Cannot record the run in {tmp_path}: another run, which has not ended, writes there."
    assert ranks(2)(train) == [f"{text}\nName another folder (--run-dir DIR)."] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.jsonl"]
    os.close(other)
    ranks(2)(lambda world: fit(world, tmp_path, steps=3) and None)


def set_joules(folder: Path, joules: int) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in (("name", "package-0"), ("max_energy_range_uj", 10**10), ("energy_uj", joules * 10**6)):
        (folder / "new").write_text(f"{text}\n")
        os.replace(folder / "new", folder / name)  # the other rank may read it at any time


def test_a_run_says_what_it_used_and_the_report_sums_its_starts(ranks, tmp_path):
    powercap = tmp_path / "powercap"
    powercap.mkdir()
    set_joules(powercap / "intel-rapl:0", 5)

    def train(world, steps, begin_j):
        joules = [begin_j]

        def loss(model, batch):
            if world.rank == 0:
                joules[0] += 200
                set_joules(powercap / "intel-rapl:0", joules[0])
            return mean_loss(model, batch)

        shown = StringIO()
        task = make_task(loss=loss)
        # As a launcher sets it, so that the ranks know which of them are of one job.
        job = {"RANK": str(world.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        patched = mock.patch.object(resources, "POWERCAP", powercap), mock.patch.dict(os.environ, job)
        with patched[0], patched[1], redirect_stdout(shown):
            settings = {"run_dir": tmp_path / "run", "checkpoint": tmp_path / "kept", "price": "9000 EUR"}
            lockstep.fit(task, steps=steps, view="lines", **settings)
        return shown.getvalue().splitlines()[-1:]

    port = 40000 + os.getpid() % 20000
    (first,), none = ranks(2)(train, 6, 5)
    (second,), _ = ranks(2)(train, 9, 1205)
    # Both ranks read the counter of the machine, which counts once: 200 J in each step, or 1/18 Wh.
    assert (none, first.partition(" EUR, ")[2]) == ([], "energy 0.333 Wh (whole devices)")
    assert second.startswith("used ") and second.endswith(" EUR, energy 0.167 Wh (whole devices)")
    whole, epoch = find_costs(read_run(tmp_path / "run"))
    assert whole.startswith("The run (starts: 2) used ") and whole.endswith(" EUR, energy 0.5 Wh (whole devices).")
    assert epoch.endswith(" EUR, energy 0.167 Wh (whole devices).")  # 3 of 9 steps
    hours = [float(text.split("used ")[1].split()[0]) for text in (first, second, whole)]
    # Of both starts; a start that prints its own figure has run some milliseconds longer than its record says.
    assert max(hours[:2]) < hours[2] < 1.02 * (hours[0] + hours[1])


@pytest.mark.parametrize("strategy", ["torch-ddp", "ddp-zero1", "dp", "single"])
def test_other_strategies_are_recorded_as_far_as_they_tell(ranks, tmp_path, strategy):
    def train(world):
        fit(world, tmp_path, strategy, steps=10)

    num_ranks = 2 if "ddp" in strategy else 1
    ranks(num_ranks)(train)
    view = view_run(tmp_path)
    assert view.run.gaps == []
    assert (view.figures.critical.exposed_s is None) == (strategy == "torch-ddp")
    assert any(each.buckets for each in view.run.zero.timelines) == (strategy == "ddp-zero1")
    assert find_window(view.run)


def test_a_slow_loader_is_told_from_the_record_alone(ranks, tmp_path):
    def train(world):
        # As on a quiet machine: other programs would come first, and leave fewer cores for loader processes.
        others = mock.patch.object(resources.MachineSampler, "_sample_cores", return_value={})
        with others, mock.patch("lockstep.base.activity.core_use", return_value=b"0 0"):
            fit(world, tmp_path, task=make_task(dataset=partial(SlowSamples, 0.001)))

    ranks(2)(train)
    view = view_run(tmp_path)
    assert view.figures.critical.data_wait_s > 0.008  # 12 ms, or 1 ms in the small batch at the end of an epoch
    assert "% data wait" in sentences(view)[1]
    assert view.advice[0].cause.startswith("Data wait is ")
    assert view.advice[0].gain > 1.5


def test_an_error_is_the_last_event_of_its_rank(ranks, tmp_path):
    def train(world):
        def loss(model, batch):
            if world.rank == 1:
                raise RuntimeError("on purpose")
            return mean_loss(model, batch)

        fit(world, tmp_path, task=make_task(loss=loss), steps=3)

    outcomes = ranks(2).each(train, timeout=30.0)
    assert "on purpose" in str(outcomes[1].error)
    run = read_run(tmp_path)
    assert run.ranks[1].events[-1].text == "RuntimeError: on purpose"


def test_a_folder_that_a_rank_cannot_write_to_is_an_error_on_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")

    def train(world):
        with pytest.raises(ConfigurationError) as error:
            fit(world, tmp_path / "file" / "run" if world.rank else tmp_path / "run", steps=3)
        return str(error.value)

    text = f"Rank 1: Cannot record the run in {tmp_path}/file/run: Not a directory.\nName another folder"
    assert ranks(2)(train) == [f"{text} (--run-dir DIR)."] * 2
