"""Nothing in DataParallel counts on Python running one thread at a time: races that a switch at any line may lose."""

import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn

from lockstep.parallel.dp import wrapper
from lockstep.parallel.dp.lanes import Lanes
from lockstep.parallel.dp.threads import ReplicaStreams
from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import FAMILIES, build, global_batch


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


def test_promises_of_many_threads_end_with_the_last():
    model = DataParallel(nn.Identity(), ["cpu", "cpu"])
    replicas = model._current_engine().replicas
    turns = [threading.Event() for _ in range(2)]

    def hold(index):
        if index == 1:
            assert turns[0].wait(30)
        with model.parameters_held():
            turns[index].set()
            if index == 0:  # begins first and ends first
                assert turns[1].wait(30)

    at_once(2, hold)
    assert replicas._holds == 0

    def hold_often(_):
        for _ in range(300):
            with model.parameters_held():
                assert replicas._holds > 0

    at_once(8, hold_often)
    assert replicas._holds == 0


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


def test_many_replicas_step_a_divided_optimizer_as_one_does():
    bare, sharded = build("transformer"), build("transformer")
    model = DataParallel(sharded, ["cpu"] * 6)
    mine = torch.optim.AdamW(bare.parameters(), lr=0.01)
    theirs = model.shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=0.01))
    loss = FAMILIES["transformer"].loss
    for step in range(4):
        batch = global_batch("transformer", 6, seed=step)
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
        loss(bare, batch).backward()
        model.backward(loss, list(zip(*(part.chunk(6) for part in batch), strict=True)), [1 / 6] * 6)
        mine.step()
        theirs.step()
    for got, wanted in zip(sharded.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


class FakeStream:
    """Records what waits for what."""

    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, device, name="own"):
        self.device, self.name = device, name

    def wait_stream(self, other):
        self.log.append((self.name, other.name))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by name only: its streams record who waits for whom."""
    FakeStream.log = []
    current = FakeStream("cuda:0", "current")
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return torch.device("cuda", 0)


def test_a_gpu_named_twice_has_a_stream_for_each_replica(gpu):
    streams = ReplicaStreams([gpu, gpu, gpu])
    for _ in range(2):
        FakeStream.log.clear()
        with streams.contexts(3) as contexts:
            assert [context.stream.name for context in contexts] == ["current", "own", "own"]
            assert contexts[1].stream is not contexts[2].stream
            assert FakeStream.log == [("own", "current")] * 2
        assert FakeStream.log == [("own", "current")] * 2 + [("current", "own")] * 2
    with pytest.raises(KeyError), streams.contexts(2):
        raise KeyError
    assert FakeStream.log[-1] == ("current", "own")  # also where a replica failed
    with ReplicaStreams([gpu, torch.device("cuda", 1)]).contexts(2) as contexts:
        assert [context.stream.name for context in contexts] == ["current", "current"]
        assert [context.home for context in contexts] == [None, contexts[0].stream]


def test_lanes_are_made_once_and_joined(gpu, monkeypatch):
    made = []

    def stream(device):
        time.sleep(0.001)
        made.append(device)
        return FakeStream(device, "lane")

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    lanes = Lanes([gpu, gpu])

    def use(_):
        with lanes.forked():
            pass

    at_once(8, use)
    assert len(made) == 2
    assert sorted(FakeStream.log) == [("current", "lane")] * 16 + [("lane", "current")] * 16
