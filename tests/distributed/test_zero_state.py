"""The state of a divided optimizer: whole or in shards, to and from the bare optimizer, on other numbers of ranks."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from tests.zero import assert_same, assert_same_state, bare, groups_of, loss_of, make, net, train

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
EACH = pytest.mark.parametrize("name", ["adamw", "adagrad", "adafactor"])


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


@pytest.mark.parametrize(
    ("name", "shard_gradients"), [("adamw", False), ("adamw", True), ("adagrad", True), ("adafactor", False)]
)
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
            f"Call consolidate_state_dict(to={world.rank}) on all ranks before, or use sharded_state_dict()."
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


@EACH
def test_in_shards_on_other_numbers_of_ranks(ranks, name, tmp_path):
    """Three ranks save, two load and save, one loads; each file is what one rank kept."""
    optimizer_class, options = OPTIMIZERS[name]

    def run(world, folder, before, steps):
        def load(optimizer):
            if before is not None:
                files = sorted((tmp_path / before).iterdir())
                optimizer.load_sharded([torch.load(file, weights_only=True, mmap=True) for file in files])

        weights = net().state_dict() if before is None else torch.load(tmp_path / f"{before}.pt", weights_only=True)
        model, optimizer = go_on(world, name, weights, load, steps)
        torch.save(optimizer.sharded_state_dict(), tmp_path / folder / f"{world.rank}.pt")
        if world.rank == 0:
            torch.save(model.state_dict(), tmp_path / f"{folder}.pt")
        optimizer.consolidate_state_dict(to=None)
        return copied(model), optimizer.state_dict()

    before = None
    for folder, num_ranks, steps in [("a", 3, [0, 1, 2]), ("b", 2, [3, 4]), ("c", 1, [5])]:
        (tmp_path / folder).mkdir()
        (weights, state), *_ = ranks(num_ranks)(run, folder, before, steps)
        before = folder
    expected, theirs = bare(optimizer_class, 6, **options)
    model = net()
    model.load_state_dict(weights)
    assert_same(model, expected)
    assert_same_state(state, theirs.state_dict())


def test_a_shard_is_its_share_of_the_file(ranks):
    def run(world):
        model = nn.Linear(64, 64)
        wrapped, optimizer = make(world, torch.optim.AdamW, model, lr=0.01)
        wrapped(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        pieces = optimizer.sharded_state_dict()["pieces"]
        return sum(
            each.untyped_storage().nbytes() for piece in pieces for each in piece["entries"].values() if each.dim()
        )

    assert ranks(2)(run) == [2 * 4 * (64 * 64 + 64) // 2] * 2


def test_what_is_missing_or_does_not_fit_is_refused(ranks):
    def run(world):
        model = net()
        wrapped, optimizer = make(world, torch.optim.AdamW, model, lr=0.01)
        train(world, wrapped, optimizer, [0])
        mine = optimizer.sharded_state_dict()
        texts = []
        for states in ([], [mine], [{**mine, "rank": rank, "layout": []} for rank in range(2)]):
            with pytest.raises(ConfigurationError) as caught:
                optimizer.load_sharded(states)
            texts.append(str(caught.value))
        return texts

    first, second = ranks(2)(run)
    assert first[0] == "There are no states to load.\nGive what sharded_state_dict() returned on every rank."
    assert first[1] == (
        "2 ranks saved a sharded state, but those given are of ranks 0.\nGive the states of all of them, each once."
    )
    assert second[1].startswith("2 ranks saved a sharded state, but those given are of ranks 1.")
    assert first[2] == (
        "The sharded state is of parameters with other shapes or another memory format.\n"
        "Use the model that it was saved with, or save whole: consolidate_state_dict() and state_dict()."
    )


def test_a_state_of_other_parameters_is_refused(ranks):
    _, optimizer = bare(torch.optim.AdamW, 1)
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:1]

    def run(world):
        _, ours = make(world, torch.optim.AdamW, net())
        with pytest.raises(ValueError, match="different number of parameter groups"):
            ours.load_state_dict(state)

    ranks(2)(run)
