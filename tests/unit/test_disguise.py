"""Code can be made to believe that it is the only process."""

import os

import pytest
import torch.distributed as dist

from lockstep.comm.process import single_process_view


def test_the_environment_says_rank_0_of_1_within(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with single_process_view():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        assert "LOCAL_RANK" not in os.environ
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


def test_it_ends_with_an_error_too():
    kept = dist.get_rank
    with pytest.raises(KeyError), single_process_view():
        raise KeyError
    assert dist.get_rank is kept is dist.distributed_c10d.get_rank
