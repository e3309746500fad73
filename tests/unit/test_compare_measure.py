import contextlib
from types import SimpleNamespace

import pytest
import torch

from lockstep.study.compare.benchmark import measure_candidate
from lockstep.train.timing import PhaseSeconds


class PlannedLoop:
    """A loop whose steps take what they are told to: backward is longer with synchronisation than without."""

    device = torch.device("cpu")

    def __init__(self, with_sync_s, without_sync_s, *, exposed_s=None, accumulate=1):
        self.strategy, self.settings = SimpleNamespace(exposed_s=exposed_s), SimpleNamespace(accumulate=accumulate)
        self._planned_s = {True: list(with_sync_s), False: list(without_sync_s)}
        self._sync, self.calls = True, []

    def step(self):
        self.calls.append(self._sync)
        planned_s = self._planned_s[self._sync]
        backward_s = planned_s.pop(0) if len(planned_s) > 1 else planned_s[0]
        times = PhaseSeconds(0.1, 0.2, backward_s, 0.01, 0.4)
        return SimpleNamespace(times=times, num_samples=8, loss=torch.tensor(float(len(self.calls))))

    @contextlib.contextmanager
    def without_sync(self):
        self._sync = False
        yield
        self._sync = True


def measure(loop, name, num_steps):
    return measure_candidate(loop, name, num_steps, 4, 1)


def test_exposed_communication_is_what_synchronisation_adds_to_the_median_backward():
    # A single slow step, with or without synchronisation, is noise and moves no median.
    loop = PlannedLoop([3.0, 3.0, 99.0, 3.0, 3.0], [2.0, 50.0, 2.0])
    turn, _ = measure(loop, "ddp", 5)
    assert turn.exposed_s == pytest.approx(1.0)


def test_steps_without_synchronisation_come_last_and_count_for_nothing_else():
    loop = PlannedLoop([3.0], [2.0])
    turn, losses = measure(loop, "torch-ddp", 12)
    assert loop.calls == [True] * 12 + [False] * 4
    assert turn.num_samples == 12 * 8
    assert [float(loss) for loss in losses] == list(range(1, 13))
    assert (turn.round, turn.place) == (4, 1)
    assert (turn.data_wait_s, turn.forward_s, turn.optimizer_s) == pytest.approx((0.1, 0.2, 0.4))
    assert turn.backward_s == pytest.approx(3.01)  # the wait for the sum of the losses is communication, too
    assert turn.step_s == turn.seconds / 12


def test_all_see_the_same_samples_so_single_runs_the_steps_without_synchronisation_too():
    loop = PlannedLoop([3.0], [2.0])
    turn, _ = measure(loop, "single", 3)
    assert loop.calls == [True] * 3 + [False] * 3
    assert turn.exposed_s is None


def test_an_engine_that_times_its_exchange_is_believed():
    turn, _ = measure(PlannedLoop([3.0], [2.0], exposed_s=0.25), "dp", 3)
    assert turn.exposed_s == pytest.approx(0.25)
    turn, _ = measure(PlannedLoop([3.0], [2.0], exposed_s=0.25, accumulate=4), "dp", 3)
    assert turn.exposed_s == pytest.approx(1.0)  # it tells of one micro-batch of four


def test_the_hosts_clock_is_not_believed_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    loop = PlannedLoop([3.0], [2.0], exposed_s=0.25)
    loop.device = torch.device("cuda", 0)
    turn, _ = measure(loop, "dp", 3)
    assert turn.exposed_s is None
