"""What a block of a script changes, and the way back to its begin."""

import contextlib
from pathlib import PurePosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.base import activity
from lockstep.comm.collectives import packed_state, unpacked_state
from lockstep.data.loader import BadSample
from lockstep.errors import CollectiveError, ConfigurationError
from lockstep.loop import recovery
from lockstep.loop.buffers import BufferSnapshot
from lockstep.loop.recovery import Changes, Recovery, exchange_state
from lockstep.train.evaluate import Evaluation
from lockstep.train.run import _PLAIN
from lockstep.train.skipping import NonFiniteStep, Origin


class Running:
    """A part with a value that has a graph."""

    loss = torch.zeros(1)

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, state):
        self.loss = state["loss"]


@pytest.fixture
def loop():
    model = nn.Linear(4, 4)
    optimizer, running = torch.optim.Adam(model.parameters(), lr=0.1), Running()
    return model, optimizer, running, Changes({"model": model, "optimizer": optimizer, "running": running})


def update(model, optimizer, running, _, num_updates=1):
    for _ in range(num_updates):
        loss = model(torch.ones(1, 4)).sum()
        running.loss = running.loss + loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer, running, _):
    steps = [state["step"].item() for state in optimizer.state.values()]
    return [*model.parameters(), running.loss], steps, optimizer.param_groups[0]["lr"]


def fail_after(loop, num_updates):
    """Return whether there is a way back from a block that fails, and the states before it and after that."""
    _, optimizer, _, changes = loop
    tensors, *rest = state_of(*loop)
    before = [tensor.detach().clone() for tensor in tensors], *rest
    with contextlib.suppress(ZeroDivisionError), changes.block(lambda _: None):
        update(*loop, num_updates)
        optimizer.param_groups[0]["lr"] = 7.0
        raise ZeroDivisionError
    is_undone = changes.undo()
    tensors, *rest = state_of(*loop)
    return is_undone, before, ([tensor.detach() for tensor in tensors], *rest)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_way_back_from_an_update_is_known_after_a_block_with_two(loop, num_updates):
    is_undone, before, after = fail_after(loop, 1)
    assert not is_undone and not torch.equal(before[0][0], after[0][0])
    assert torch.equal(before[0][-1], after[0][-1]) and before[2] == after[2] == 0.1, "kept in each block"
    with loop[-1].block(lambda _: None):
        update(*loop, num_updates)
    is_undone, before, after = fail_after(loop, 2)
    assert is_undone == (num_updates == 2)
    if is_undone:
        assert all(map(torch.equal, before[0], after[0])) and before[1:] == after[1:]


def test_a_block_that_changes_nothing_before_it_fails_is_undone(loop):
    assert fail_after(loop, 0)[0]


def test_parameters_that_change_before_the_update(loop):
    model, *_, changes = loop
    with changes.block(lambda _: None):
        model.weight.data.mul_(0.9)  # which autograd does not notice
        update(*loop)
    assert fail_after(loop, 1)[0]


def test_gradients_that_a_block_leaves_for_the_next(loop):
    model, optimizer, _, changes = loop
    with changes.block(lambda _: None):
        model(torch.ones(1, 4)).sum().backward()
    assert not fail_after(loop, 0)[0]
    optimizer.zero_grad()
    assert fail_after(loop, 0)[0]


def test_the_gradient_of_a_scaler_is_unscaled_again():
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = Changes({"model": model, "optimizer": optimizer, "scaler": scaler})
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), changes.block(lambda _: None):
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            scaler.unscale_(optimizer)
            raise ZeroDivisionError
        assert changes.undo()


def test_an_optimizer_that_is_no_part_may_step_inside_of_one_that_is(loop):
    model, *_, changes = loop
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"^SGD\.step\(\) was called in a block of lockstep\.Recovery"
    with pytest.raises(ConfigurationError, match=message), changes.block(lambda _: None):
        other.step()
    other.step()  # outside of blocks

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            other.step()

    outer = Outer(model.parameters(), lr=0.1)
    with Changes({"model": model, "outer": outer}).block(lambda _: None):
        outer.step()


class Member:
    """Stands for the membership: notes when it is asked whether a rank was lost."""

    def __init__(self, calls, is_lost):
        self._calls, self._is_lost = calls, is_lost

    @property
    def is_cut(self):
        self._calls.append("is_cut")
        return self._is_lost


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_comes_before_an_update(monkeypatch, is_lost):
    # The device is waited for when all collectives were started, and only then it is known whether they were cut.
    calls = []
    monkeypatch.setattr(recovery, "broadcast_coalesced", lambda buffers, group: calls.append(("send", len(buffers))))
    monkeypatch.setattr(recovery, "synchronize", lambda device: calls.append(("wait", device.type)))
    attempts = Recovery(SimpleNamespace(is_late=False, owned=None), model=nn.BatchNorm1d(2))
    attempts.before_update()
    assert calls == [], "without recovery"
    attempts._world = SimpleNamespace(device=torch.device("cuda"), group=None)
    attempts._membership = Member(calls, is_lost)
    attempts._buffers = [BufferSnapshot(nn.BatchNorm1d(2))]
    with (
        pytest.raises(CollectiveError, match=r"^A rank was lost in this step\.$")
        if is_lost
        else contextlib.nullcontext()
    ):
        attempts.before_update()
    assert calls == [("send", 3), ("wait", "cuda"), "is_cut"]


def test_a_state_that_only_pickle_can_send_is_refused_at_the_source(monkeypatch):
    moved = []
    monkeypatch.setattr(recovery, "has_all_gather", lambda group, device: True)
    monkeypatch.setattr(recovery, "_send_or_receive", lambda tensor, *_: moved.append(tensor))
    state = {"scheduler": {"last_lr": [np.float64(0.1)], "seen": {1}}, "files": {"path": PurePosixPath("a")}}
    message = (
        r"^The state of files cannot be sent to the rank that takes the place of a lost one\. It holds "
        r"pathlib\S*PurePosixPath\.\nReturn tensors, numbers, "
    )
    group = SimpleNamespace(rank=lambda: 1)
    with pytest.raises(ConfigurationError, match=message):
        exchange_state(state, 1, 0, group, torch.device("cpu"), bool)
    assert moved == []


def test_what_a_run_has_found_so_far_can_be_sent():
    origin = Origin(rank=1, micro=0, samples=[3], faulty=[3], loss="nan")
    found = [
        NonFiniteStep(step=2, epoch=0, origins=(origin,), parameter="a", num_ranks=2, num_micro=1, again=True),
        BadSample(sample=4, epoch=0, step=1, cause="it is empty", others=(5,)),
        Evaluation(step=3, metrics={"loss": 0.5}),
    ]
    received = unpacked_state(packed_state(found), _PLAIN)
    assert received == found and [*map(type, received)] == [*map(type, found)]


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_state_that_was_cut_is_refused_before_it_is_read(monkeypatch, num_good):
    # Size, structure and tensors: an aborted message leaves anything, such as a huge size.
    read, moved, checked = [], [], []
    monkeypatch.setattr(recovery, "has_all_gather", lambda group, device: True)
    monkeypatch.setattr(recovery, "_send_or_receive", lambda tensor, *_: moved.append(tensor))
    message = {"value": torch.empty(2)}, [True]
    monkeypatch.setattr(recovery, "unpacked_state", lambda *data: read.append(data) or message)

    def refuse_cut():
        checked.append(len(moved))
        if len(checked) > num_good:
            raise CollectiveError("A rank was lost in this step.")

    group = SimpleNamespace(rank=lambda: 1)
    with pytest.raises(CollectiveError, match=r"^A rank was lost in this step\.$"):
        exchange_state({}, 0, 1, group, torch.device("cpu"), refuse_cut)
    assert checked == [1, 2, 3][: num_good + 1] and len(read) == (num_good == 2)


def test_a_captured_graph_is_refused(monkeypatch):
    """NCCL would wait for it when the groups of a lost rank are left."""
    attempts = Recovery(SimpleNamespace(is_late=False, owned=None), model=nn.BatchNorm1d(2))
    monkeypatch.setattr(activity.now, "has_captured", True)
    with attempts.attempt():
        pass  # without a launcher that replaces ranks there is nothing to refuse
    attempts._membership = Member([], False)
    message = r"^A CUDA graph has captured collectives, and NCCL cannot abort what a graph holds: "
    with pytest.raises(ConfigurationError, match=message), attempts.attempt():
        pytest.fail("it has begun")
