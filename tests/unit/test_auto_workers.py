"""The number of loader processes, found by trying."""

import re

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import lockstep
from lockstep.data import auto_workers
from lockstep.data.auto_workers import Loaders, WorkerSearch, WorkerTuner, num_cores, search_for
from tests.training import make_task, samples


def search(most, load_s, compute_s, *, overhead_s=0.0):
    """Run a search on a machine where loading a batch takes one process so long; return it."""
    found = WorkerSearch(most)
    while not found.is_done:
        workers = found.current.workers
        if workers == 0:
            found.record(load_s + compute_s, load_s)
        else:
            step_s = max(compute_s, load_s / workers) + overhead_s
            found.record(step_s, step_s - compute_s)
    return found


def tried(found):
    return [(trial.loaders.workers, trial.loaders.ahead) for trial in found.trials]


@pytest.mark.parametrize(
    ("load_s", "compute_s", "trials", "chosen"),
    [
        (0.001, 0.1, [(0, 2)], 0),  # cheap: nothing else is tried
        (0.05, 0.1, [(0, 2), (1, 2)], 1),
        (0.25, 0.1, [(0, 2), (1, 2), (2, 2), (4, 2)], 4),
        (0.205, 0.1, [(0, 2), (1, 2), (2, 2)], 2),  # 2.5 % of a step are no reason for more
        (1.0, 0.001, [(0, 2), (1, 2), (2, 2), (4, 2), (8, 2), (12, 2), (12, 4)], 12),
    ],
)
def test_the_fewest_are_chosen_that_are_fast_enough(load_s, compute_s, trials, chosen):
    found = search(12, load_s, compute_s)
    assert tried(found) == trials
    assert found.current == Loaders(chosen)


def test_what_does_not_help_is_not_taken():
    found = search(12, 0.01, 0.1, overhead_s=0.02)  # the cores that load are those that compute
    assert (tried(found), found.current) == ([(0, 2), (1, 2), (2, 2)], Loaders(0))
    assert search(1, 0.5, 0.1).current == Loaders(1)


def test_more_is_loaded_ahead_if_that_helps():
    found = WorkerSearch(1)
    for step_s, wait_s in ((2.0, 1.5), (1.5, 1.0), (1.0, 0.2)):
        found.record(step_s, wait_s)
    assert (found.is_done, found.current) == (True, Loaders(1, 4))
    assert found.describe() == (
        "workers auto: 1 loader process with 4 batches ahead each, 1e+03 ms a step, 20% of it waiting for data; "
        "tried 0: 2e+03 ms, 1: 1.5e+03 ms"
    )


def test_the_answer_is_one_line():
    assert search(2, 0.001, 0.1).describe() == (
        "workers auto: 0 loader processes, 101 ms a step, 1% of it waiting for data"
    )


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_steps_are_timed_once_the_buffers_have_settled_and_not_what_lies_between_them():
    clock, asked = Clock(), []

    def agree(figures):
        asked.append(figures)
        return [figures, [2 * figures[0], 0.0]]  # another rank took twice as long

    tuner = WorkerTuner(WorkerSearch(4), clock, agree)
    changes = []
    for step in range(20):
        clock.now_s += 100.0  # an evaluation, say
        tuner.begin_step()
        first = step in (0, 1, 6, 7, 8, 9)  # of no and of one process
        clock.now_s += 5.0 if first else 0.25
        tuner.waited(4.0 if first else 0.125)
        changes.append(tuner.end_step())
        if tuner.search.is_done:
            break
    assert changes.index(True) == 5
    assert asked[0] == [1.0, 0.5]
    first, second, *_ = tuner.search.trials
    assert (first.loaders, first.step_s, first.wait_s) == (Loaders(0), 0.5, 0.125)
    assert (second.loaders, second.step_s, second.wait_s) == (Loaders(1), 0.5, 0.125)


def test_short_steps_are_timed_for_longer():
    clock = Clock()
    tuner = WorkerTuner(WorkerSearch(0), clock, None)
    for _ in range(2 + 64):
        assert not tuner.search.trials
        tuner.begin_step()
        clock.now_s += 0.01
        tuner.end_step()
    assert len(tuner.search.trials) == 1


def test_the_cores_are_shared(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12), raising=False)
    monkeypatch.setattr("lockstep.env.cpu_quota", lambda: None)
    assert [num_cores(processes) for processes in (1, 5, 20)] == [12, 2, 1]
    monkeypatch.setattr("lockstep.env.cpu_quota", lambda: 4.5)
    assert num_cores(1) == 4
    assert search_for("auto", 2).most == 2
    assert search_for(3, 2) is None


class Slow(Dataset):
    """Samples that take their time, and some noise."""

    def __init__(self):
        self.samples = samples()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        torch.randn(50_000)
        inputs, *rest = self.samples[index]
        return inputs + torch.randn(6, dtype=torch.float64), *rest


class Streamed(IterableDataset):
    """The same as a stream, which does not say where it stands."""

    def __iter__(self):
        """Read all of it."""
        slow = Slow()
        yield from (slow[index] for index in range(len(slow)))


@pytest.mark.parametrize(("dataset", "accumulate"), [(Slow, 1), (Slow, 2), (Streamed, 1)])
def test_the_search_changes_nothing_else(monkeypatch, capfd, dataset, accumulate):
    monkeypatch.setattr(auto_workers, "_WINDOW_S", 0.0)
    monkeypatch.setattr(auto_workers, "num_cores", lambda num_processes: 2)
    task = make_task(dataset=dataset, eval_dataset=Slow)

    def losses(**settings):
        return lockstep.fit(task, strategy="single", steps=40, accumulate=accumulate, **settings).losses

    found = losses(workers="auto")
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("workers auto: ")]
    assert len(said) == 1
    assert re.fullmatch(
        r"workers auto: \d loader process.* ms a step, \d+% of it waiting for data; tried .*\d ms", said[0]
    )
    assert found == losses(workers=0, quiet=True)
