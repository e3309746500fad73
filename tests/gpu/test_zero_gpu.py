"""ZeroRedundancyOptimizer on CUDA: two ranks over Gloo on one GPU, and NCCL with one rank."""

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.distributed.test_zero_parity import batch, groups_of, loss_of, net
from tests.models import relative_error


def loss_on_gpu(model, step, rank, size):
    inputs, targets = (part.chunk(size)[rank].cuda() for part in batch(step))
    return (model(inputs, step % 2) - targets).square().mean()


def train_beside_oracle(world, optimizer_class, overlaps):
    model, oracle = net().cuda(), net()
    wrapped = lockstep.DistributedDataParallel(model, device_ids=[0])
    optimizer = lockstep.ZeroRedundancyOptimizer(groups_of(model), optimizer_class, lr=0.01)
    optimizer.overlaps = overlaps
    expected = optimizer_class(groups_of(oracle), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.wait()
        loss_on_gpu(wrapped, step, world.rank, world.world_size).backward()
        optimizer.step()
        expected.zero_grad()
        loss_of(oracle, step).backward()
        expected.step()
    optimizer.wait()
    for mine, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        assert relative_error(mine.detach().cpu(), theirs.detach()) < 1e-9


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("overlaps", [False, True])
def test_two_ranks_on_one_gpu(ranks, optimizer_class, overlaps):
    ranks(2)(train_beside_oracle, optimizer_class, overlaps)


def nccl_alone(world):
    dist.destroy_process_group()
    with lockstep.init(backend="nccl", device="cuda:0") as own:
        train_beside_oracle(own, torch.optim.AdamW, True)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_nccl_with_one_rank(ranks):
    ranks(1, warnings="ignore")(nccl_alone)
