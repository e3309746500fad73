"""Which backwards are synchronised: accumulation, several forwards or backwards, nested backwards, the bare module."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.models import assert_gradients_equal, build, global_batch, share, squared_error


def pair(world, **options):
    return lockstep.DistributedDataParallel(build("mlp"), **options), build("mlp")


def parts(world, seed):
    batch = global_batch("mlp", 4 * world.world_size, seed)
    return batch, share(batch, world.rank, world.world_size)


def accumulate(world, how, set_to_none):
    model, oracle = pair(world)
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        oracle.zero_grad()
        for micro_step in range(3):
            batch, mine = parts(world, 10 * step + micro_step)
            is_last = micro_step == 2
            if how == "attribute":  # as nanoGPT does
                model.require_backward_grad_sync = is_last
                (squared_error(model, mine) / 3).backward()
            elif is_last:
                (squared_error(model, mine) / 3).backward()
            else:
                with model.no_sync():
                    (squared_error(model, mine) / 3).backward()
                local = [parameter.grad.clone() for parameter in model.parameters()]
            (squared_error(oracle, batch) / 3).backward()
        assert_gradients_equal(model.module, oracle)
    return None if how == "attribute" else [gradient.sum().item() for gradient in local]


@pytest.mark.parametrize(("how", "set_to_none"), [("no_sync", False), ("attribute", True)])
def test_accumulation(ranks, how, set_to_none):
    local = ranks(2)(accumulate, how, set_to_none)
    assert how == "attribute" or local[0] != local[1], "gradients were synchronised inside no_sync"


def several_forwards_one_backward(world):
    model, oracle = pair(world)
    for step in range(3):
        model.zero_grad()
        oracle.zero_grad()
        (batch, mine), (other_batch, other_mine) = parts(world, step), parts(world, 50 + step)
        (squared_error(model, mine) + squared_error(model, other_mine)).backward()
        (squared_error(oracle, batch) + squared_error(oracle, other_batch)).backward()
        assert_gradients_equal(model.module, oracle)


def several_backwards(world):
    """Two forwards, then two backwards; the second must be synchronised too. And the same graph twice."""
    model, oracle = pair(world)
    for step in range(3):
        model.zero_grad()
        oracle.zero_grad()
        (batch, mine), (other_batch, other_mine) = parts(world, step), parts(world, 50 + step)
        first, second = squared_error(model, mine), squared_error(model, other_mine)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        (2 * squared_error(oracle, batch) + squared_error(oracle, other_batch)).backward()
        assert_gradients_equal(model.module, oracle)


@pytest.mark.parametrize("scenario", [several_forwards_one_backward, several_backwards])
def test_several_forwards_and_backwards(ranks, scenario):
    ranks(2)(scenario)


def bare_module(world):
    model, _ = pair(world)
    _, mine = parts(world, 0)
    for _ in range(2):
        squared_error(model, mine).backward()
    model.zero_grad()
    squared_error(model.module, mine).backward()
    return model.module[0].weight.grad.sum().item()


def test_backward_through_the_bare_module_is_not_synchronised(ranks):
    first, second = ranks(2)(bare_module)
    assert first != second


def evaluation_between(world):
    model, oracle = pair(world)
    for step in range(3):
        batch, mine = parts(world, step)
        model.zero_grad()
        oracle.zero_grad()
        loss = squared_error(model, mine)
        model.eval()
        with torch.no_grad():
            model(mine[0])
        model.train()
        model(mine[0])  # a forward whose backward never comes
        loss.backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)


def test_forwards_without_backward_in_between(ranks):
    ranks(2)(evaluation_between)


class Layers(nn.Module):
    def __init__(self, num_checkpoints):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.num_checkpoints = num_checkpoints

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(self.num_checkpoints):
            x = checkpoint(self.layers[1], x, use_reentrant=True)
        return self.layers[2](x)


def late_repeat(world):
    model = lockstep.DistributedDataParallel(Layers(1), bucket_cap_mb=0.00001)
    model(torch.ones(1, 6)).sum().backward()
    model.module.num_checkpoints = 2
    model(torch.ones(1, 6)).sum().backward()


def test_pattern_that_cannot_be_supported_is_an_error(ranks):
    """A layer that is checkpointed more often than in the first step, after its bucket has left."""
    with pytest.raises(lockstep.errors.LockstepError) as caught:
        ranks(2)(late_repeat)
    assert str(caught.value).split(": ", 1)[1] == (
        "parameter layers.1.bias received a second gradient in one backward, after its bucket had been sent.\n"
        "This happens when a layer is checkpointed several times with use_reentrant=True in some steps but not in the "
        "first. Use use_reentrant=False."
    )


def whole_wrapper_checkpointed(world):
    model, oracle = pair(world)
    for step in range(3):
        batch, mine = parts(world, step)
        model.zero_grad()
        oracle.zero_grad()
        inputs = mine[0].requires_grad_()
        output = checkpoint(model, inputs, use_reentrant=step % 2 == 0)
        nn.functional.mse_loss(output, mine[1]).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)


def test_wrapper_inside_a_checkpoint(ranks):
    ranks(2)(whole_wrapper_checkpointed)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("planted")


def fail_then_continue(world):
    model, oracle = pair(world)
    for step in range(4):
        batch, mine = parts(world, step)
        model.zero_grad()
        oracle.zero_grad()
        if step == 2:
            # The failure strikes after the last layers' gradients have arrived.
            model.module[0].register_forward_hook(lambda _module, _inputs, output: FailingBackward.apply(output))
            with pytest.raises(ArithmeticError):
                squared_error(model, mine).backward()
            model.module[0]._forward_hooks.clear()
            model.zero_grad()
        squared_error(model, mine).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)


def test_training_goes_on_after_a_backward_that_failed_on_all_ranks(ranks):
    ranks(2)(fail_then_continue)


def held_gradients(world, as_view):
    model, _ = pair(world, gradient_as_bucket_view=as_view)
    same = True
    for step in range(4):
        held = [parameter.grad for parameter in model.parameters()]
        aliases = [gradient.view(-1) for gradient in held if gradient is not None]
        copies = [gradient.clone() for gradient in aliases]
        if step == 3:
            held = []
        model.zero_grad()
        _, mine = parts(world, step)
        squared_error(model, mine).backward()
        same = same and all(torch.equal(*each) for each in zip(aliases, copies, strict=True))
        del held
    return same


def test_gradients_that_somebody_holds_do_not_change(ranks):
    assert ranks(2)(held_gradients, False) == [True, True]
    assert ranks(2)(held_gradients, True) == [False, False]  # what the flag promises nobody does


def memory_of_gradients(world):
    """After the first steps the buckets are reused: no bytes are added from step to step."""
    model, _ = pair(world)
    storages = set()
    for step in range(6):
        model.zero_grad()
        _, mine = parts(world, step)
        squared_error(model, mine).backward()
        if step >= 2:
            storages.add(model.module[0].weight.grad.untyped_storage().data_ptr())
    return len(storages)


def test_buckets_are_reused(ranks):
    assert ranks(2)(memory_of_gradients) == [1, 1]


def forgotten_wrapper(world):
    """A wrapper that is gone must leave the model alone, and a second one must work."""
    bare = build("mlp")
    first = lockstep.DistributedDataParallel(bare)
    _, mine = parts(world, 0)
    squared_error(first, mine).backward()
    del first
    gc.collect()
    oracle = build("mlp")
    second = lockstep.DistributedDataParallel(bare)
    for step in range(2):
        bare.zero_grad()
        oracle.zero_grad()
        batch, mine = parts(world, step)
        squared_error(second, mine).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(bare, oracle)


def test_wrapping_again(ranks):
    ranks(2)(forgotten_wrapper)


def deep_copy(world):
    model, oracle = pair(world)
    _, mine = parts(world, 0)
    squared_error(model, mine).backward()
    clone = copy.deepcopy(model)
    clone.zero_grad()
    for step in range(2):
        batch, mine = parts(world, step)
        clone.zero_grad()
        oracle.zero_grad()
        squared_error(clone, mine).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(clone.module, oracle)
    return clone.module[0].weight is not model.module[0].weight


def test_deep_copies_train_on_their_own(ranks):
    assert ranks(2)(deep_copy) == [True, True]
