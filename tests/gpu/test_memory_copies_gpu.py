"""On a GPU a copy in memory is of the state as it was, though the device has not come to it yet."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.train.memory_copies import MemoryCopies

pytestmark = pytest.mark.timeout(120)


def test_what_is_kept_is_the_state_at_the_copy(tmp_path):
    with lockstep.init() as world, MemoryCopies(tmp_path, world, is_writer=True, several_hosts=False) as copies:
        model = nn.Linear(2048, 2048).to(world.device)
        for step in (1, 2, 3):
            expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
            torch.cuda._sleep(20_000_000)  # so that the copies are far behind the host
            copies.save({"model": model.state_dict()}, step=step)
            assert copies.is_writer
            assert copies._slots[(step - 1) % 2]._is_registered
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)  # as the next step would
        copies.close()
        newest = MemoryCopies(tmp_path, world, is_writer=True, several_hosts=False).newest()
        assert newest.step == 3
        found = newest.load()["model"]
        assert all(torch.equal(found[name], value) for name, value in expected.items())
