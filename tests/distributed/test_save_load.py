"""`lockstep.save` and `lockstep.load` over ranks: one writes, all read, and all hear of a problem."""

import socket

import pytest
import torch
from torch import nn

import lockstep
from lockstep.train.checkpoint import CheckpointError

pytestmark = pytest.mark.timeout(120)


def save_and_load(world, path):
    model = nn.Linear(2, 2)
    wrapped = lockstep.DistributedDataParallel(model)
    lockstep.save(path, model=wrapped, number=world.rank)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    found = lockstep.load(path, model=wrapped)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError) as caught:
        lockstep.save(path, bad=object())
    return found["number"], str(caught.value).partition("\n")[0], lockstep.load(path)["number"]


def test_rank_zero_writes_and_all_read(ranks, tmp_path):
    path = str(tmp_path / "c")
    message = f"The checkpoint {path} cannot hold builtins.object at state.bad."
    assert list(ranks(2)(save_and_load, path)) == [(0, message, 0)] * 2


def test_ranks_that_read_different_folders_are_told_apart(ranks, tmp_path):
    def load(world):
        folder = tmp_path / str(world.rank)
        with pytest.raises(CheckpointError) as caught:
            lockstep.load(folder)
        return str(caught.value)

    for name in ("0", "1"):
        lockstep.save(tmp_path / name, step=1)
    host = socket.gethostname()
    texts = [
        f"Rank 1 on {host} reads another checkpoint {tmp_path / name} than rank 0 on {host}.\n"
        "It must be one folder that every rank sees, such as on a network drive, and no save may be replacing it."
        for name in ("0", "1")
    ]
    assert list(ranks(2)(load)) == texts
