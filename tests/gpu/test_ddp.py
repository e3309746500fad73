"""DistributedDataParallel on CUDA: two ranks over Gloo on one GPU, and NCCL with one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share


def to_gpu(batch):
    return tuple(part.cuda() for part in batch)


def train_beside_oracle(world, name):
    family = FAMILIES[name]
    oracle = build(name).cuda()
    model = lockstep.DistributedDataParallel(build(name, seed=world.rank).cuda(), device_ids=[0], bucket_cap_mb=0.0005)
    for step in range(3):
        batch = global_batch(name, 4 * world.world_size, seed=step)
        model.zero_grad()
        oracle.zero_grad()
        inputs, targets = share(batch, world.rank, world.world_size)
        family.loss(model, (inputs, targets.cuda())).backward()  # inputs are moved by the wrapper
        family.loss(oracle, to_gpu(batch)).backward()
        assert_gradients_equal(model.module, oracle, tolerance=1e-11)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "reused", "reentrant"])
def test_two_ranks_on_one_gpu(ranks, name):
    ranks(2)(train_beside_oracle, name)


def nccl_alone(world, name):
    dist.destroy_process_group()
    with lockstep.init(backend="nccl", device="cuda:0"):
        family = FAMILIES[name]
        oracle, model = build(name).cuda(), lockstep.DistributedDataParallel(build(name).cuda(), device_ids=[0])
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(3):
            batch = to_gpu(global_batch(name, 4, seed=step))
            model.zero_grad()
            oracle.zero_grad()
            family.loss(model, batch).backward()
            family.loss(oracle, batch).backward()
            assert_gradients_equal(model.module, oracle, tolerance=1e-11)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize("name", ["mlp", "reused"])
def test_nccl_with_one_rank_and_a_hook(ranks, name):
    """A hook makes one rank use its buckets, streams and NCCL, as many ranks would."""
    ranks(1, warnings="ignore")(nccl_alone, name)


def wrong_device(world):
    lockstep.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=["cuda:0", "cuda:0"])


def test_several_devices_are_refused(ranks):
    with pytest.raises(ValueError) as caught:
        ranks(1)(wrong_device)
    assert str(caught.value) == "device_ids can only be None or contain a single element."
