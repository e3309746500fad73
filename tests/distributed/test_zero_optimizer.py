"""ZeroRedundancyOptimizer as an optimizer: groups, schedulers, scaling, hooks, freezing, and what is refused."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.comm.collectives import Join, all_reduce
from lockstep.errors import ConfigurationError, LockstepError, ModelMismatch
from tests.distributed.test_zero_parity import (
    assert_same,
    assert_same_state,
    bare,
    batch,
    groups_of,
    loss_of,
    make,
    net,
    train,
)

ADAMW = {"lr": 0.01, "weight_decay": 0.1}
BOTH = pytest.mark.parametrize("shard_gradients", [False, True])


def flat_weights(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def oracle(change, num_steps, before=lambda step, optimizer: None):
    """Train in this process; ``change(step, model, optimizer)`` comes before each step."""
    model = net()
    optimizer = torch.optim.AdamW(groups_of(model), **ADAMW)
    for step in range(num_steps):
        change(step, model, optimizer)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model, optimizer


def divided(world, change, num_steps, **settings):
    model = net()
    wrapped, optimizer = make(world, torch.optim.AdamW, model, **ADAMW, **settings)
    for step in range(num_steps):
        change(step, model, optimizer)
        train(world, wrapped, optimizer, [step])
    return model, optimizer


def test_schedulers_move_the_rates(ranks):
    def run(world):
        schedulers = {}

        def change(step, _model, optimizer):
            if step == 0:
                schedulers[optimizer] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            else:
                schedulers[optimizer].step()

        model, optimizer = divided(world, change, 4, shard_gradients=True)
        expected, theirs = oracle(change, 4)
        assert_same(model, expected)
        rates = [group["lr"] for group in theirs.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == rates == [0.00125, 0.0005]
        assert [group["lr"] for group in optimizer.optim.param_groups] == rates

    ranks(2)(run)


def test_parameters_are_frozen_and_thawed(ranks):
    """No weight decay, momentum or step count touches what is frozen; the wrapper knows of it from the start."""

    def change(step, model, _optimizer):
        model.conv.requires_grad_(step not in (2, 3))

    def run(world):
        model = net()
        optimizer = ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, **ADAMW)
        for step in range(6):
            change(step, model, optimizer)
            optimizer.zero_grad()
            loss_of(model, step, world.rank, world.world_size).backward()
            for each in model.parameters():  # a script that averages by itself
                if each.grad is not None:
                    all_reduce(each.grad, group=world.group)
                    each.grad /= world.world_size
            before = model.conv.weight.detach().clone()
            optimizer.step()
            assert torch.equal(before, model.conv.weight) == (step in (2, 3))
        expected, theirs = oracle(change, 6)
        assert_same(model, expected)
        optimizer.consolidate_state_dict(to=None)
        assert_same_state(optimizer.state_dict(), theirs.state_dict())

    ranks(2)(run)


@BOTH
def test_a_group_is_added(ranks, shard_gradients):
    def change(step, model, optimizer):
        if step == 0:
            model.first.requires_grad_(True)
        if step == 3:
            optimizer.add_param_group({"params": [model.extra], "lr": 0.5})

    def with_extra():
        model = net()
        model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        return model

    def run(world):
        model = with_extra()
        wrapped = DistributedDataParallel(model)
        groups = [{"params": [each for each in model.parameters() if each is not model.extra]}]
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, shard_gradients=shard_gradients, **ADAMW)
        theirs = with_extra()
        groups = [{"params": [each for each in theirs.parameters() if each is not theirs.extra]}]
        expected = torch.optim.AdamW(groups, **ADAMW)
        for step in range(5):
            change(step, model, optimizer)
            change(step, theirs, expected)
            train(world, wrapped, optimizer, [step])
            expected.zero_grad()
            loss_of(theirs, step).backward()
            expected.step()
        assert_same(model, theirs)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]

    ranks(2)(run)


def test_closures(ranks):
    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, **ADAMW)
        losses = []
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(wrapped, step, world.rank, world.world_size)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert_same(model, bare(torch.optim.AdamW, 3, **ADAMW)[0])
        return losses

    first, second = ranks(2)(run)
    assert first != second


def test_grad_scaler(ranks):
    """An overflow on one rank reaches all through the averaged gradients, and all skip the step."""

    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, **ADAMW)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(wrapped, step, world.rank, world.world_size)
            scaler.scale(loss * (torch.inf if step == 1 and world.rank == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        expected = net()
        theirs = torch.optim.AdamW(groups_of(expected), **ADAMW)
        for step in (0, 2, 3):
            theirs.zero_grad()
            loss_of(expected, step).backward()
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            theirs.step()
        assert_same(model, expected)
        assert scaler.get_scale() == 512.0

    ranks(2)(run)


def test_grad_scaler_is_refused_with_slices(ranks):
    def run(world):
        wrapped, optimizer = make(world, torch.optim.AdamW, net(), shard_gradients=True, **ADAMW)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(wrapped, 0, world.rank, world.world_size)).backward()
        scaler.step(optimizer)

    text = (
        "GradScaler looks for overflows in all gradients, but with shard_gradients=True a rank has a part.\n"
        "Leave shard_gradients out."
    )
    refused(ranks, run, ConfigurationError, text)


def test_hooks_and_zero_grad(ranks):
    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, **ADAMW)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(world, wrapped, optimizer, [0])
        optimizer.zero_grad(set_to_none=False)
        assert all(each.grad is None or not each.grad.any() for each in model.parameters())
        optimizer.zero_grad()
        assert all(each.grad is None for each in model.parameters())
        before = flat_weights(model)
        optimizer.step()  # nothing has a gradient
        assert torch.equal(flat_weights(model), before)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return calls

    assert ranks(2)(run) == [["before", "after", "before", "after"]] * 2


@BOTH
def test_no_sync_accumulates(ranks, shard_gradients):
    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, shard_gradients=shard_gradients, **ADAMW)
        for step in range(3):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, step, world.rank, world.world_size, head=0).backward()
            loss_of(wrapped, step + 10, world.rank, world.world_size, head=0).backward()
            optimizer.step()
        expected = net()
        theirs = torch.optim.AdamW(groups_of(expected), **ADAMW)
        for step in range(3):
            theirs.zero_grad()
            loss_of(expected, step, head=0).backward()
            loss_of(expected, step + 10, head=0).backward()
            theirs.step()
        assert_same(model, expected)

    ranks(2)(run)


def test_weights_count_with_slices(ranks):
    """Rank r has r + 1 samples of each batch; the mean is over all of them."""

    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, shard_gradients=True, **ADAMW)
        expected = net()
        theirs = torch.optim.AdamW(groups_of(expected), **ADAMW)
        for step in range(4):
            inputs, targets = (part[:6] for part in batch(step))
            mine = slice(0, 1) if world.rank == 0 else slice(1, 3) if world.rank == 1 else slice(3, 6)
            optimizer.zero_grad()
            loss = (wrapped(inputs[mine], step % 2) - targets[mine]).square().mean()
            lockstep.backward(loss, count=world.rank + 1)
            optimizer.step()
            theirs.zero_grad()
            (expected(inputs, step % 2) - targets).square().mean().backward()
            theirs.step()
        assert_same(model, expected)

    ranks(3)(run)


def test_adding_to_slices_is_refused(ranks):
    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, shard_gradients=True, **ADAMW)
        train(world, wrapped, optimizer, [0, 1, 2])
        optimizer.zero_grad()
        loss_of(wrapped, 3, world.rank, world.world_size).backward()
        optimizer.zero_grad()  # a step that is skipped is fine
        loss_of(wrapped, 3, world.rank, world.world_size).backward()
        loss_of(wrapped, 3, world.rank, world.world_size).backward()

    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "A backward adds to gradients that were already reduced to each rank's slice.\n"
            "Call step() or zero_grad() first; run all but the last forward and backward of a step in no_sync(), "
            "or leave shard_gradients out."
        )


def test_uneven_inputs(ranks):
    """Rank 1 has two batches less; with its gradients set by hand, as the join context of torch wants."""

    def run(world):
        model = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(0.5)
                each.grad = torch.ones_like(each)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([optimizer]):
            for _ in range(3 if world.rank == 0 else 1):
                optimizer.step()
        return flat_weights(model)

    for weights in ranks(2)(run):
        torch.testing.assert_close(weights, torch.full((8,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize(("num_ranks", "shard_gradients"), [(2, False), (3, True)])
def test_a_rank_keeps_its_share_of_the_state(ranks, num_ranks, shard_gradients):
    def run(world):
        model = nn.Sequential(nn.Linear(40, 301), nn.Linear(301, 17), nn.Linear(17, 3))
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, shard_gradients=shard_gradients, **ADAMW
        )
        wrapped(torch.randn(4, 40)).sum().backward()
        optimizer.step()
        held = sum(
            value.numel() for entries in optimizer.optim.state.values() for value in entries.values() if value.dim()
        )
        return held, 2 * sum(each.numel() for each in model.parameters())

    for held, whole in ranks(num_ranks)(run):
        assert held == pytest.approx(whole / num_ranks, rel=0.01)


def test_parameters_of_several_dtypes(ranks):
    def run(world):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 3), nn.Linear(3, 2).bfloat16()])
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
        torch.manual_seed(0)
        other = nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 3), nn.Linear(3, 2).bfloat16()])
        expected = torch.optim.AdamW(other.parameters(), **ADAMW)
        for _ in range(3):
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.grad = torch.randn_like(mine)
                theirs.grad = mine.grad.clone()
                all_reduce(mine.grad, group=world.group, op="max")
                theirs.grad.copy_(mine.grad)
            optimizer.step()
            expected.step()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)

    ranks(3)(run)


def test_parameters_that_were_given_other_memory_are_taken_back(ranks):
    def change(step, model, _optimizer):
        if step == 2:
            model.first.weight.data = model.first.weight.data * 1.5

    def run(world):
        model, _ = divided(world, change, 4)
        assert_same(model, oracle(change, 4)[0])

    ranks(2)(run)


def test_autograd_notices_the_update(ranks):
    def run(world):
        model = nn.Linear(3, 3, dtype=torch.float64)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        inputs = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        loss = model(model(inputs)).sum()
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    ranks(2)(run)


def refused(ranks, run, kind, text):
    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, kind), outcome.error
        assert str(outcome.error) == text


def test_ranks_that_differ_are_refused_on_all(ranks):
    def sizes(world):
        ZeroRedundancyOptimizer(nn.Linear(3, 3 + world.rank).parameters(), torch.optim.SGD, lr=0.1)

    outcomes = ranks(2).each(sizes)
    assert all(isinstance(outcome.error, ModelMismatch) for outcome in outcomes)
    assert str(outcomes[0].error).startswith(
        "The models differ between ranks: rank 0 has parameter 0 of the optimizer of float32[3, 3] with strides "
    )

    def groups(world):
        parameters = list(nn.Linear(3, 3).parameters())
        given = [{"params": parameters[:1]}, {"params": parameters[1:]}] if world.rank else parameters
        ZeroRedundancyOptimizer(given, torch.optim.SGD, lr=0.1)

    text = (
        "The arguments differ between ranks: rank 0 has SGD, param groups of 2 parameters; rank 1 has SGD, param "
        "groups of 1, 1 parameters.\nGive the same arguments on every rank."
    )
    refused(ranks, groups, ConfigurationError, text)


def test_sparse_gradients_are_refused(ranks):
    def run(world):
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    text = (
        "Parameter 0 of the optimizer received a sparse gradient, which cannot be divided among ranks.\n"
        "Build nn.Embedding and nn.EmbeddingBag with sparse=False, or use a separate optimizer for them."
    )
    refused(ranks, run, LockstepError, text)


WRONG_ARGUMENTS = [
    (
        lambda params: ZeroRedundancyOptimizer(params, torch.optim.LBFGS),
        ConfigurationError,
        "LBFGS works with all parameters together, so it cannot be divided among ranks.\n"
        "Use it as it is, without ZeroRedundancyOptimizer.",
    ),
    (
        lambda params: ZeroRedundancyOptimizer(params, torch.optim.SGD(params, lr=0.1)),
        ConfigurationError,
        None,
    ),
    (
        lambda params: ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=True, lr=0.1),
        ConfigurationError,
        "overlap_with_ddp=True is not supported.\n"
        "Leave it out; shard_gradients=True with lockstep.DistributedDataParallel is the faster way.",
    ),
    (
        lambda params: ZeroRedundancyOptimizer(params, torch.optim.SGD, shard_gradients=True, lr=0.1),
        ConfigurationError,
        "shard_gradients=True, but no lockstep.DistributedDataParallel averages these parameters' gradients.\n"
        "Wrap the model before the optimizer is made, or leave shard_gradients out.",
    ),
    (
        lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adafactor, shard_gradients=True),
        ConfigurationError,
        "shard_gradients=True needs an element-wise optimizer, which Adafactor is not known to be.\n"
        "Leave it out, or say elementwise=True if its update of an element depends on nothing else.",
    ),
    (lambda params: ZeroRedundancyOptimizer([], torch.optim.SGD, lr=0.1), ValueError, None),
    (lambda params: ZeroRedundancyOptimizer(params[0], torch.optim.SGD, lr=0.1), TypeError, None),
    (lambda params: ZeroRedundancyOptimizer([*params, 3], torch.optim.SGD, lr=0.1), TypeError, None),
]


def test_wrong_arguments(ranks):
    def run(world):
        found = []
        for make_optimizer, _, _ in WRONG_ARGUMENTS:
            try:
                make_optimizer(list(nn.Linear(3, 3).parameters()))
            except Exception as error:
                found.append((type(error), str(error)))
        return found

    for found in ranks(2)(run):
        for (kind, text), (_, expected_kind, expected) in zip(found, WRONG_ARGUMENTS, strict=True):
            assert issubclass(kind, expected_kind), text
            assert expected in (None, text)


def test_a_wrapper_that_is_only_in_part_in_the_optimizer_is_refused(ranks):
    def run(world):
        model = net()
        wrapped = DistributedDataParallel(model)
        ZeroRedundancyOptimizer(model.first.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.1)
        assert wrapped is not None

    text = (
        "shard_gradients=True, but 9 of the 11 trained parameters of the wrapper are not in this optimizer.\n"
        "Give it all of model.parameters(), or leave shard_gradients out."
    )
    refused(ranks, run, ConfigurationError, text)


def test_two_live_wrappers_of_the_same_parameters_are_refused(ranks):
    """Which of them reduces is not to depend on addresses; one that only a cycle keeps does not count."""

    def run(world):
        model = net()
        unused = DistributedDataParallel(model)
        unused.itself = [unused]
        del unused
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.1)
        train(world, wrapped, optimizer, [0, 1])
        second = DistributedDataParallel(model)
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.1)
        assert second is not None

    text = (
        "shard_gradients=True, but 2 live lockstep.DistributedDataParallel wrappers average these parameters' "
        "gradients.\nOnly one can use shard_gradients: delete those that are no longer used, or leave "
        "shard_gradients out."
    )
    refused(ranks, run, ConfigurationError, text)
