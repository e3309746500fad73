"""Weights on CUDA: two ranks over Gloo on one GPU, and NCCL with one rank."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import ConfigurationError
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch

SIZES = [[[3], [5]], [[1, 2], [4]], [[0, 2], [3, 0]], [[4], [4]]]


def train_uneven(name, rank, sizes_by_step):
    family, oracle = FAMILIES[name], build(name).cuda()
    model = lockstep.DistributedDataParallel(build(name).cuda(), device_ids=[0], bucket_cap_mb=0.0005)
    for step, sizes in enumerate(sizes_by_step):
        flat = [n for mine in sizes for n in mine]
        batch = tuple(part.cuda() for part in global_batch(name, sum(flat), seed=step))
        pieces = list(zip(*(part.split(flat) for part in batch), strict=True))
        first = sum(len(mine) for mine in sizes[:rank])
        model.zero_grad()
        oracle.zero_grad()
        for index, n in enumerate(sizes[rank]):
            with contextlib.nullcontext() if index == len(sizes[rank]) - 1 else model.no_sync():
                part = pieces[first + index] if n else tuple(tensor[:1] for tensor in batch)
                lockstep.backward(
                    family.loss(model, part) * (1.0 if n else float("nan")), mean_over=torch.tensor(n).cuda()
                )
        family.loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle, tolerance=1e-11)


def two_ranks(world, name):
    train_uneven(name, world.rank, SIZES)


@pytest.mark.parametrize("name", ["mlp", "transformer", "reused"])
def test_two_ranks_on_one_gpu(ranks, name):
    ranks(2)(two_ranks, name)


def nccl_alone(world, name):
    dist.destroy_process_group()
    with lockstep.init(backend="nccl", device="cuda:0"):
        train_uneven(name, 0, [[[3]], [[1, 2]], [[0, 2]], [[3, 0]], [[4]]])


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_nccl_with_one_rank(ranks):
    ranks(1, warnings="ignore")(nccl_alone, "mlp")


def forget(world):
    """Rank 1 gives no weight in its third step; it does not look until its next backward begins."""
    model = lockstep.DistributedDataParallel(build("mlp").cuda())
    inputs = global_batch("mlp", 2, 0)[0].cuda()
    for step in range(4):
        if world.rank == 0 and step == 2:
            model.mean_over(1)
        model(inputs).sum().backward()


def test_a_rank_without_a_weight_is_named_on_every_rank(ranks):
    for outcome in ranks(2).each(forget, timeout=30.0):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error).startswith("A weight is missing in this step: rank 1 ran a backward without one")
