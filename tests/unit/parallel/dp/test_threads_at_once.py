"""Nothing in DataParallel counts on Python running one thread at a time: races that a switch at any line may lose."""

import sys
import threading

import pytest
import torch
from torch import nn

from lockstep.parallel.dp import wrapper
from lockstep.parallel.dp.wrapper import DataParallel


@pytest.fixture(autouse=True)
def _switch_all_the_time():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(count, work):
    """Call ``work(i)`` in ``count`` threads that start together; raise what one of them raised."""
    errors, together = [], threading.Barrier(count, timeout=30)

    def call(index):
        try:
            together.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_first_calls_from_many_threads_make_one_engine(monkeypatch):
    made = []
    plain = wrapper.ReplicaEngine

    def engine(module, devices):
        made.append(plain(module, devices))
        return made[-1]

    monkeypatch.setattr(wrapper, "ReplicaEngine", engine)
    for attempt in range(1, 31):
        model = DataParallel(nn.Identity(), ["cpu", "cpu"])
        at_once(8, lambda _, model=model: model._current_engine())
        assert len(made) == attempt


def test_many_replicas_and_callers_lose_no_gradient():
    """Each caller adds to the same gradients; sums of small integers have the same bits in every order."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(20))

        def forward(self, x):
            return sum((layer * x).sum() for layer in self.layers)

    module, num_replicas, num_callers, num_steps = Net(), 6, 4, 10
    model = DataParallel(module, ["cpu"] * num_replicas)
    shards = [torch.full((3,), float(index + 1)) for index in range(num_replicas)]

    def work(_):
        for _ in range(num_steps):
            model.backward(lambda replica, x: replica(x), shards, [1.0] * num_replicas)

    at_once(num_callers, work)
    expected = [21.0 * num_callers * num_steps] * 3
    assert all(layer.grad.tolist() == expected for layer in module.layers)
