"""The state of a divided optimizer: whole or in shards, to and from the bare optimizer, on other numbers of ranks."""

import operator
from collections import defaultdict

import pytest
import torch

import lockstep
from tests.distributed.test_zero_parity import (
    assert_same,
    assert_same_state,
    bare,
    groups_of,
    loss_of,
    make,
    net,
    train,
)

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def copied(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def go_on(world, name, weights, load, steps, **settings):
    """Return a model that goes on from ``weights`` with an optimizer that ``load`` has filled."""
    optimizer_class, options = OPTIMIZERS[name]
    model = net()
    model.load_state_dict(weights)
    wrapped, optimizer = make(world, optimizer_class, model, **settings, **options)
    load(optimizer)
    train(world, wrapped, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize(("name", "shard_gradients"), [("adamw", True), ("adagrad", False), ("adafactor", False)])
def test_from_the_bare_optimizer_and_back(ranks, name, shard_gradients):
    optimizer_class, options = OPTIMIZERS[name]
    model, optimizer = bare(optimizer_class, 3, **options)
    weights, state = copied(model), optimizer.state_dict()

    def run(world):
        mine, ours = go_on(
            world, name, weights, lambda each: each.load_state_dict(state), [3, 4], shard_gradients=shard_gradients
        )
        ours.consolidate_state_dict(to=1)
        if world.rank == 1:
            return copied(mine), ours.state_dict()
        with pytest.raises(RuntimeError) as caught:
            ours.state_dict()
        assert str(caught.value) == (
            f"Optimizer state has not been consolidated on this rank.\n"
            f"Call consolidate_state_dict(to={world.rank}) on all ranks before, or use lockstep.save()."
        )
        return None

    _, (weights, state), _ = ranks(3)(run)
    expected, theirs = bare(optimizer_class, 6, **options)
    last = net()
    last.load_state_dict(weights)
    optimizer = optimizer_class(groups_of(last), **options)
    optimizer.load_state_dict(state)
    loss_of(last, 5).backward()
    optimizer.step()
    assert_same(last, expected)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_saved_in_shards_and_loaded_on_other_numbers_of_ranks(ranks, name, tmp_path):
    """Three ranks save, two load and save, one loads."""
    optimizer_class, options = OPTIMIZERS[name]

    def run(world, before, after, steps):
        model = net()
        wrapped, optimizer = make(world, optimizer_class, model, **options)
        if before:
            lockstep.load(tmp_path / before, model=model, optimizer=optimizer)
        train(world, wrapped, optimizer, steps)
        lockstep.save(tmp_path / after, model=model, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=None)
        return model.state_dict(), optimizer.state_dict()

    ranks(3)(run, None, "a", [0, 1, 2])
    ranks(2)(run, "a", "b", [3, 4])
    ((weights, state),) = ranks(1)(run, "b", "c", [5])
    expected, theirs = bare(optimizer_class, 6, **options)
    model = net()
    model.load_state_dict(weights)
    assert_same(model, expected)
    assert_same_state(state, theirs.state_dict())


def test_a_state_of_other_parameters_is_refused(ranks):
    _, optimizer = bare(torch.optim.AdamW, 1)
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:1]

    def run(world):
        _, ours = make(world, torch.optim.AdamW, net())
        with pytest.raises(ValueError, match="different number of parameter groups"):
            ours.load_state_dict(state)

    ranks(2)(run)


def test_hooks_of_the_state_get_all_of_it(ranks):
    def run(world):
        wrapped, optimizer = make(world, torch.optim.Adam, net(), lr=0.01)
        train(world, wrapped, optimizer, [0])
        seen = []
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "numbers": sorted(state["state"])})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: seen.append((state["numbers"], len(state["state"])))
        )
        optimizer.consolidate_state_dict(to=None)
        optimizer.load_state_dict(optimizer.state_dict())
        return seen

    numbers = sorted(bare(torch.optim.Adam, 1, lr=0.01)[1].state_dict()["state"])
    assert ranks(2)(run) == [[(numbers, len(numbers))]] * 2


def assign_new(optimizer, parameter):
    optimizer.state = defaultdict(dict)


CLEARED = {
    "all": lambda optimizer, parameter: optimizer.state.clear(),
    "assigned": assign_new,
    "one": lambda optimizer, parameter: operator.setitem(optimizer.state, parameter, {}),
    "popped": lambda optimizer, parameter: optimizer.state.pop(parameter, None),
    "read": lambda optimizer, parameter: optimizer.state[parameter],  # removes nothing
}


@pytest.mark.parametrize("how", CLEARED)
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_state_that_the_script_clears(ranks, name, how):
    def run(world):
        kind, options = OPTIMIZERS[name]
        results = []
        for make_optimizer in (kind, lambda params, **given: lockstep.ZeroRedundancyOptimizer(params, kind, **given)):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
            optimizer = make_optimizer(model.parameters(), **options)
            for step in range(5):
                if step == 3:
                    CLEARED[how](optimizer, model[0].bias)
                optimizer.zero_grad()
                model(torch.ones(2, 3).double() * (1 + step)).square().sum().backward()
                optimizer.step()
            results.append(list(model.parameters()))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
        with pytest.raises(lockstep.errors.ConfigurationError, match="is divided among the ranks, and cannot be"):
            optimizer.state = {model[0].bias: {"step": 1}}

    ranks(2)(run)
