"""`lockstep.init` and `lockstep.launch` on GPUs."""

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError, RankFailed


def test_each_rank_gets_its_gpu_and_nccl():
    def work():
        with lockstep.init() as world:
            total = torch.ones(1, device=world.device) * (world.rank + 1)
            torch.distributed.all_reduce(total)
            world.barrier()
            return str(world.device), torch.cuda.current_device(), world.backend, total.item()

    count = torch.cuda.device_count()
    total = count * (count + 1) / 2
    assert lockstep.launch(work) == [(f"cuda:{rank}", rank, "nccl", total) for rank in range(count)]


def test_more_ranks_than_gpus():
    count = torch.cuda.device_count()
    with pytest.raises(
        ConfigurationError, match=f"{count + 1} devices were requested, but this machine has {count} GPU"
    ):
        lockstep.launch(print, devices=count + 1)


def test_the_cpu_can_be_asked_for():
    def work():
        with lockstep.init(device="cpu") as world:
            return str(world.device), world.backend

    assert lockstep.launch(work, devices=1) == [("cpu", "shm")]


def test_a_failing_rank_does_not_wait_for_peers_in_a_collective():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def work():
        with lockstep.init() as world:
            if world.rank == 1:
                raise ValueError("boom")
            torch.distributed.all_reduce(torch.ones(1, device=world.device))
            torch.cuda.synchronize()

    with pytest.raises(RankFailed, match="Rank 1 failed: ValueError: boom"):
        lockstep.launch(work, devices=2, timeout_s=100)
