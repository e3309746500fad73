"""Buckets in memory that all ranks of a shm group map: the same gradients, as free to be held and dropped."""

import copy
import gc
import pickle

import pytest
import torch

import lockstep
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share
from tests.shm import shm_group

SOME = ("transformer", "reused", "sparse", "complex")


def is_shared(group, bucket):
    return group.shm_ops.buffers.find(bucket.payload)[0] >= 0


def step_beside_oracle(world, model, oracle, name, seed):
    batch = global_batch(name, 4 * world.world_size, seed)
    model.zero_grad()
    oracle.zero_grad()
    FAMILIES[name].loss(model, share(batch, world.rank, world.world_size)).backward()
    FAMILIES[name].loss(oracle, batch).backward()
    assert_gradients_equal(model.module, oracle)


def train(world, name):
    with shm_group() as group:
        model = lockstep.DistributedDataParallel(build(name), process_group=group, bucket_cap_mb=0.0005)
        oracle = build(name)
        shared = []
        for seed in range(6):
            step_beside_oracle(world, model, oracle, name, seed)
            gc.collect()  # what the comparison has left in cycles holds gradients
            shared.append([is_shared(group, b) for b in model.reducer.bucket_set.buckets if not b.spec.sparse])
        assert all(all(each) for each in shared)
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                pickle.loads(pickle.dumps(parameter.grad))
                assert torch.equal(copy.deepcopy(parameter.grad), parameter.grad)
        return len(shared[-1])


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES if name not in SOME)]
)
def test_gradients_equal_one_process(ranks, name):
    warnings = "ignore" if name == "sparse" else "error"  # torch 2.11 warns of the sums of sparse tensors
    assert min(ranks(2, warnings=warnings)(train, name)) >= 1


def test_three_ranks(ranks):
    ranks(3)(train, "transformer")


def hold_on_one_rank(world):
    with shm_group() as group:
        model, oracle = lockstep.DistributedDataParallel(build("mlp"), process_group=group), build("mlp")
        for seed in range(2):
            step_beside_oracle(world, model, oracle, "mlp", seed)
        held = [parameter.grad for parameter in model.parameters()] if world.rank == 0 else []
        copies = [gradient.clone() for gradient in held]
        for seed in range(2, 8):
            step_beside_oracle(world, model, oracle, "mlp", seed)
        assert all(torch.equal(*pair) for pair in zip(held, copies, strict=True))
        return [is_shared(group, bucket) for bucket in model.reducer.bucket_set.buckets]


def test_a_gradient_that_one_rank_holds_keeps_its_value(ranks):
    """That rank's bucket takes memory of its own, and both ranks reduce the ordinary way."""
    assert ranks(2)(hold_on_one_rank) == [[False], [True]]


def copy_on_one_rank(world):
    with shm_group() as group:
        model, oracle = lockstep.DistributedDataParallel(build("mlp"), process_group=group), build("mlp")
        step_beside_oracle(world, model, oracle, "mlp", 0)
        clone = copy.deepcopy(model) if world.rank == 0 else None
        for seed in range(2):
            step_beside_oracle(world, model, oracle, "mlp", seed)
        return clone is None or torch.equal(clone.module[0].weight, model.module[0].weight)


def test_one_rank_may_copy_its_wrapper_alone(ranks):
    assert ranks(2)(copy_on_one_rank) == [True, True]


def drop_wrapper(world):
    with shm_group() as group:
        bare, oracle = build("mlp"), build("mlp")
        for _ in range(2):
            model = lockstep.DistributedDataParallel(bare, process_group=group)
            for seed in range(2):
                step_beside_oracle(world, model, oracle, "mlp", seed)
            gradients = [parameter.grad for parameter in bare.parameters()]
            del model
            gc.collect()
        kept = [gradient.clone() for gradient in gradients]
    gc.collect()
    return all(torch.equal(*pair) for pair in zip(gradients, kept, strict=True))


def test_gradients_outlive_wrapper_and_group(ranks):
    assert ranks(2)(drop_wrapper) == [True, True]


def narrow_wire(world):
    """What bfloat16 travels in is shared; a rank without data takes part with memory of its own."""
    with shm_group() as group:
        model = lockstep.DistributedDataParallel(
            build("mlp"), process_group=group, compression="bf16", bucket_cap_mb=0.0005
        )
        buffers = model.reducer.reduction._buffers
        with model.join():
            for seed in range(3 + world.rank):
                model.zero_grad()
                batch = global_batch("mlp", 4 * world.world_size, seed)
                FAMILIES["mlp"].loss(model, share(batch, world.rank, world.world_size)).backward()
        buckets = model.reducer.bucket_set.buckets
        assert all(group.shm_ops.buffers.find(buffers[bucket])[0] >= 0 for bucket in buckets)
        return len(buckets), [parameter.grad for parameter in model.parameters()] if world.rank else None


def test_what_narrow_gradients_travel_in_is_shared(ranks):
    (num_buckets, _), (also, gradients) = ranks(2)(narrow_wire)
    assert num_buckets == also > 1
    alone = build("mlp")  # rank 0 had no data in the last step: its gradients counted as zeros
    FAMILIES["mlp"].loss(alone, share(global_batch("mlp", 8, 3), 1, 2)).backward()
    for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad / 2, rtol=2.0**-7, atol=1e-6)
