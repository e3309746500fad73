"""Weights with what else a wrapper can do, and what happens where weights are missing or wrong."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp import comm_hooks, weighting
from tests.models import assert_gradients_equal, build, global_batch, relative_error, soak, squared_error

SIZES = [[[3], [5]], [[1, 2], [4]], [[0, 2], [3, 0]], [[4], [4]]]


def cut(batch, sizes):
    """Return each rank's micro-batches."""
    pieces = iter(zip(*(tensor.split([n for rank in sizes for n in rank]) for tensor in batch), strict=True))
    return [[next(pieces) for _ in rank] for rank in sizes]


def uneven_batch(name, sizes, seed):
    batch = global_batch(name, sum(itertools.chain(*sizes)), seed)
    return batch, cut(batch, sizes)


def train(world, model, oracle, loss, sizes_by_step, tolerance=1e-12):
    """Train beside one process on all samples, without an optimizer; return the largest error of a gradient."""
    worst = 0.0
    for step, sizes in enumerate(sizes_by_step):
        batch, parts = uneven_batch("mlp", sizes, step)
        model.zero_grad()
        oracle.zero_grad()
        mine = list(zip(parts[world.rank], sizes[world.rank], strict=True))
        for index, (part, n) in enumerate(mine):
            with contextlib.nullcontext() if index == len(mine) - 1 else model.no_sync():
                model.mean_over(n)
                loss(model, part if n else tuple(tensor.new_ones(1, tensor.shape[1]) for tensor in part)).backward()
        loss(oracle, batch).backward()
        for parameter, expected in zip(model.module.parameters(), oracle.parameters(), strict=True):
            worst = max(worst, relative_error(parameter.grad.double(), expected.grad.double()))
    return worst


# --- precision and kinds of buckets -----------------------------------------------------------------------------------


def half(world, dtype):
    """Only narrow buckets: weights need a message of their own. The oracle rounds as the model does."""
    oracle, model = build("mlp").to(dtype), lockstep.DistributedDataParallel(build("mlp").to(dtype))

    def loss(model, part):
        inputs, targets = (tensor.to(dtype) for tensor in part)
        return nn.functional.mse_loss(model(inputs), targets) * 1000

    return train(world, model, oracle, loss, [[[n] for n in (2000, 3000)], [[4096], [0]], *SIZES, [[2003], [1]]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), *soak([(torch.bfloat16, 5e-2)])])
def test_half_precision_holds_no_weight_but_gets_the_mean(ranks, dtype, tolerance):
    """Weights as large as 4096 would overflow float16 in a product with the gradients."""
    assert max(ranks(2)(half, dtype)) < tolerance


class OnlySparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=True, dtype=torch.float64)

    def forward(self, tokens):
        return self.words(tokens)


def sparse_only(world):
    """No bucket has a tail: ballots need a message of their own."""
    torch.manual_seed(0)
    oracle = OnlySparse()
    model = lockstep.DistributedDataParallel(OnlySparse())
    oracle.load_state_dict(model.module.state_dict())
    for step, sizes in enumerate(SIZES):
        tokens = torch.randint(7, (sum(itertools.chain(*sizes)), 3), generator=torch.Generator().manual_seed(step))
        parts = cut((tokens,), sizes)[world.rank]
        model.zero_grad()
        oracle.zero_grad()
        for index, (part,) in enumerate(parts):
            with contextlib.nullcontext() if index == len(parts) - 1 else model.no_sync():
                n = len(part)
                lockstep.backward(model(part if n else tokens[:1]).square().mean(), count=n)
        oracle(tokens).square().mean().backward()
        assert_gradients_equal(model.module, oracle)


def test_a_model_with_nothing_but_sparse_gradients(ranks):
    ranks(2)(sparse_only)


class TwoDtypes(nn.Module):
    """Two layers of different dtypes that do not see each other; each makes a part of the output."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 1), nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x):
        return torch.cat([self.wide(x), self.narrow(x.float()).double()], dim=1)


def mixed(world):
    """One bucket of float32 and one of float64: weights travel in the wider."""
    torch.manual_seed(0)
    oracle, model = TwoDtypes(), lockstep.DistributedDataParallel(TwoDtypes())
    oracle.load_state_dict(model.module.state_dict())
    train(world, model, oracle, squared_error, [[[7], [3]], [[1], [10]], [[2], [1]]])
    return relative_error(model.module.wide.weight.grad, oracle.wide.weight.grad)


def test_parameters_of_two_dtypes(ranks):
    assert max(ranks(2)(mixed)) < 1e-12


# --- several backwards ------------------------------------------------------------------------------------------------


def several_backwards(world, how):
    """Each synchronised backward adds a mean of its own; one weight serves all backwards of a micro-batch."""
    model, oracle = lockstep.DistributedDataParallel(build("mlp")), build("mlp")
    sizes = [[2], [5]]
    for step in range(3):
        batch, parts = uneven_batch("mlp", sizes, step)
        other, other_parts = uneven_batch("mlp", sizes, 50 + step)
        model.zero_grad()
        oracle.zero_grad()
        n = sizes[world.rank][0]
        first, second = (squared_error(model, each[world.rank][0]) for each in (parts, other_parts))
        if how == "one weight":
            model.mean_over(n)
            first.backward(retain_graph=True)
            second.backward()
            first.backward()
        else:
            lockstep.backward(first, count=n)
            lockstep.backward(second, count=n)
        (squared_error(oracle, batch) * (2 if how == "one weight" else 1) + squared_error(oracle, other)).backward()
        assert_gradients_equal(model.module, oracle)


@pytest.mark.parametrize("how", ["one weight", "counts"])
def test_several_backwards(ranks, how):
    ranks(2)(several_backwards, how)


def several_losses_of_an_accumulated_batch(world):
    model, oracle = lockstep.DistributedDataParallel(build("mlp")), build("mlp")
    sizes = [[2, 3], [5, 1]]
    for step in range(3):
        batch, parts = uneven_batch("mlp", sizes, step)
        model.zero_grad()
        oracle.zero_grad()
        for index, (part, n) in enumerate(zip(parts[world.rank], sizes[world.rank], strict=True)):
            with model.no_sync() if index == 0 else contextlib.nullcontext():
                output = model(part[0])
            loss, penalty = nn.functional.mse_loss(output, part[1]), output.square().mean()
            model.mean_over(n)
            (loss + penalty).backward() if index else loss.backward(retain_graph=True)
            if index == 0:
                penalty.backward()
        output = oracle(batch[0])
        (nn.functional.mse_loss(output, batch[1]) + output.square().mean()).backward()
        assert_gradients_equal(model.module, oracle)


def test_two_backwards_of_one_micro_batch_count_once(ranks):
    ranks(2)(several_losses_of_an_accumulated_batch)


def two_models(world):
    """As in a GAN: forwards of one model happen in the steps of the other; weights stick to what backward reaches."""
    maker = lockstep.DistributedDataParallel(build("mlp"))
    judge = lockstep.DistributedDataParallel(nn.Linear(3, 1, dtype=torch.float64))
    plain_maker = build("mlp")
    plain_judge = nn.Linear(3, 1, dtype=torch.float64)
    plain_judge.load_state_dict(judge.module.state_dict())
    sizes = [[2], [6]][: world.world_size]
    for step in range(3):
        batch, parts = uneven_batch("mlp", sizes, step)
        inputs, n = parts[world.rank][0][0], sizes[world.rank][0]
        for each in (maker, judge, plain_maker, plain_judge):
            each.zero_grad()
        made = maker(inputs)
        lockstep.backward(judge(made.detach()).square().mean(), count=n)
        plain_made = plain_maker(batch[0])
        plain_judge(plain_made.detach()).square().mean().backward()
        assert_gradients_equal(judge.module, plain_judge)
        assert maker.module[0].weight.grad is None
        lockstep.backward(judge(made).abs().mean(), count=n)
        plain_judge(plain_made).abs().mean().backward()
        assert_gradients_equal(judge.module, plain_judge)
        assert_gradients_equal(maker.module, plain_maker)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_models(ranks, num_ranks):
    ranks(num_ranks)(two_models)


def checkpointed(world, use_reentrant):
    model, oracle = lockstep.DistributedDataParallel(build("mlp")), build("mlp")

    def loss(model, part):
        inputs = part[0].clone().requires_grad_()
        output = checkpoint(model, inputs, use_reentrant=use_reentrant) if model is not oracle else model(inputs)
        return nn.functional.mse_loss(output, part[1])

    return train(world, model, oracle, loss, SIZES)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_wrapper_inside_a_checkpoint(ranks, use_reentrant):
    assert max(ranks(2)(checkpointed, use_reentrant)) < 1e-12


# --- other ways to reduce and step ------------------------------------------------------------------------------------


def optimizer_in_backward(world):
    from torch.distributed.optim import _apply_optimizer_in_backward  # it warns where it is imported

    model, oracle = build("mlp"), build("mlp")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    wrapped = lockstep.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step, sizes in enumerate(SIZES):
        batch, parts = uneven_batch("mlp", sizes, step)
        mine = list(zip(parts[world.rank], sizes[world.rank], strict=True))
        for index, (part, n) in enumerate(mine):
            with contextlib.nullcontext() if index == len(mine) - 1 else wrapped.no_sync():
                part = part if n else tuple(tensor.new_ones(1, tensor.shape[1]) for tensor in part)
                lockstep.backward(squared_error(wrapped, part), count=n)
        optimizer.zero_grad()
        squared_error(oracle, batch).backward()
        optimizer.step()
    for mine, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-15)


def test_optimizers_inside_backward_step_on_the_weighted_mean(ranks):
    ranks(2, warnings="ignore")(optimizer_in_backward)


def skip_unused(world):
    model = lockstep.DistributedDataParallel(build("reused"), skip_all_reduce_unused_params=True, bucket_cap_mb=1e-5)
    worst = 0.0
    for step, sizes in enumerate(SIZES):
        oracle = build("reused")
        batch, parts = uneven_batch("reused", sizes, step)
        model.zero_grad()
        mine = list(zip(parts[world.rank], sizes[world.rank], strict=True))
        for index, (part, n) in enumerate(mine):
            with contextlib.nullcontext() if index == len(mine) - 1 else model.no_sync():
                part = part if n else tuple(tensor.new_ones(1, tensor.shape[1]) for tensor in part)
                lockstep.backward(squared_error(model, part), count=n)
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)
    return worst


def test_skipping_unused_buckets(ranks):
    ranks(2)(skip_unused)


# --- held gradients, sizes, cost --------------------------------------------------------------------------------------


def held(world):
    model = lockstep.DistributedDataParallel(build("mlp"))
    for step, sizes in enumerate(SIZES):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        copies = [gradient.clone() for gradient in gradients]
        model.zero_grad()
        _, parts = uneven_batch("mlp", sizes, step)
        mine = list(zip(parts[world.rank], sizes[world.rank], strict=True))
        for index, (part, n) in enumerate(mine):
            with contextlib.nullcontext() if index == len(mine) - 1 else model.no_sync():
                part = part if n else tuple(tensor.new_ones(1, tensor.shape[1]) for tensor in part)
                lockstep.backward(squared_error(model, part), count=n)
        assert all(torch.equal(*each) for each in zip(gradients, copies, strict=True))


def test_gradients_that_somebody_holds_do_not_change(ranks):
    ranks(2)(held)


def equal_weights(world):
    weighed, plain = (lockstep.DistributedDataParallel(build("mlp")) for _ in range(2))
    for step in range(4):
        _, parts = uneven_batch("mlp", [[7], [7]], step)
        for model in (weighed, plain):
            model.zero_grad()
        weighed.mean_over(7)
        squared_error(weighed, parts[world.rank][0]).backward()
        squared_error(plain, parts[world.rank][0]).backward()
        for mine, other in zip(weighed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)


def test_equal_weights_give_the_same_bits_as_none(ranks):
    ranks(2)(equal_weights)


def count_messages(world):
    """Return how many collectives a step takes without weights, with the first one, and with different ones."""
    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.0005)
    counts = []
    for n in (None, None, 3 + world.rank, 5 - world.rank):
        with (
            mock.patch.object(comm_hooks, "all_reduce_work", wraps=comm_hooks.all_reduce_work) as buckets,
            mock.patch.object(comm_hooks, "all_reduce", wraps=comm_hooks.all_reduce) as last,
            mock.patch.object(weighting, "all_reduce", wraps=weighting.all_reduce) as apart,
        ):
            if n is not None:
                model.mean_over(n)
            squared_error(model, global_batch("mlp", 2, 0)).backward()
            counts.append((buckets.call_count + last.call_count, apart.call_count))
    return counts


def test_weights_travel_with_the_gradients(ranks):
    for counts in ranks(2)(count_messages):
        (num_buckets, roll_call), *later = counts
        assert num_buckets > 2 and roll_call == 1
        assert later == [(num_buckets, 0)] * 3


# --- what is wrong ----------------------------------------------------------------------------------------------------


def missing(who):
    return (
        f"A weight is missing in this step: {who} ran a backward without one, but other backwards of the step had "
        "theirs.\nCall model.mean_over(n) before each backward, or lockstep.backward(loss, mean_over=n), on all ranks "
        "or on none; n is 0 where a batch holds nothing that counts."
    )


def forget(world, forgetful, step_of_fault, hook):
    model = lockstep.DistributedDataParallel(build("mlp"))
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(step_of_fault + 1):
        if step < step_of_fault or world.rank not in forgetful:
            model.mean_over(2)
        squared_error(model, global_batch("mlp", 2, 0)).backward()


@pytest.mark.parametrize(
    ("forgetful", "who", "step_of_fault", "hook"),
    [([1], "rank 1", 0, False), ([0, 2], "ranks 0, 2", 2, False), ([1], "rank 1", 2, True)],
)
def test_ranks_without_a_weight_are_named_on_every_rank(ranks, forgetful, who, step_of_fault, hook):
    for outcome in ranks(3).each(forget, forgetful, step_of_fault, hook, timeout=30.0):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error).split("\n---")[0] == missing(who)


def start_late(world):
    """Steps without weights first; then one rank begins to give them."""
    model = lockstep.DistributedDataParallel(build("mlp"))
    for _ in range(2):
        squared_error(model, global_batch("mlp", 2, 0)).backward()
    if world.rank == 0:
        model.mean_over(1)
    squared_error(model, global_batch("mlp", 2, 0)).backward()


def forget_a_micro_batch(world):
    """Rank 1 weighs the first of two micro-batches only."""
    model = lockstep.DistributedDataParallel(build("mlp"))
    for index in range(2):
        with contextlib.nullcontext() if index else model.no_sync():
            if index == 0 or world.rank == 0:
                model.mean_over(1)
            squared_error(model, global_batch("mlp", 2, 0)).backward()


def forget_the_first_micro_batch(world):
    """Rank 1 weighs the second of two micro-batches only."""
    model = lockstep.DistributedDataParallel(build("mlp"))
    for index in range(2):
        with contextlib.nullcontext() if index else model.no_sync():
            if index == 1 or world.rank == 0:
                model.mean_over(1)
            squared_error(model, global_batch("mlp", 2, 0)).backward()


@pytest.mark.parametrize("fault", [start_late, forget_a_micro_batch, forget_the_first_micro_batch])
def test_other_ways_to_forget_a_weight(ranks, fault):
    for outcome in ranks(2).each(fault, timeout=30.0):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error).split("\n---")[0] == missing("rank 1")


def all_zero(world, before):
    model = lockstep.DistributedDataParallel(build("mlp"))
    for _ in range(before):
        model.mean_over(2)
        squared_error(model, global_batch("mlp", 2, 0)).backward()
    model.zero_grad()
    model.mean_over(0)
    (squared_error(model, global_batch("mlp", 2, 0)) * float("nan")).backward()
    return [parameter.grad.count_nonzero().item() for parameter in model.parameters()]


@pytest.mark.parametrize("before", [0, 2])
def test_if_all_weights_are_zero_gradients_are_zero(ranks, before):
    assert ranks(2)(all_zero, before) == [[0] * 6] * 2


def unreached(world):
    model = lockstep.DistributedDataParallel(build("mlp"))
    texts = []
    part = global_batch("mlp", 2, 0)
    for run_first in (False, True):
        if run_first:
            model(part[0])
        plain = nn.Linear(6, 3, dtype=torch.float64)
        with pytest.raises(ConfigurationError) as caught:
            lockstep.backward(squared_error(plain, part), count=2)
        texts.append(str(caught.value))
    squared_error(model, part).backward()  # the count of a backward that did not reach it is forgotten
    return texts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_count_that_reaches_no_wrapped_model(ranks, num_ranks):
    text = (
        "The backward reached no model that is wrapped in DistributedDataParallel, so mean_over had no effect.\n"
        "Compute the loss with the wrapped model, not with its .module, or call loss.backward()."
    )
    assert ranks(num_ranks)(unreached) == [[text, text]] * num_ranks
