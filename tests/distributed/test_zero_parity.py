"""A divided optimizer does what the bare one does on the whole batch, and all ranks hold the same bits."""

import pytest
import torch
from torch import nn

from lockstep.parallel.zero.partition import ELEMENTWISE
from tests.shm import shm_group
from tests.zero import assert_same, assert_same_state, bare, make, net, train

NUM_STEPS = 5
ELEMENT = sorted(ELEMENTWISE, key=lambda each: each.__name__)
OPTIONS = {
    torch.optim.SGD: {"momentum": 0.9, "weight_decay": 0.01},
    torch.optim.Adam: {"amsgrad": True, "weight_decay": 0.01},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
}


def options_of(optimizer_class):
    return {"lr": 0.01, **OPTIONS.get(optimizer_class, {})}


class Layerwise(torch.optim.Optimizer):
    """Scales each parameter's step by its norms, as LAMB does: it cannot work on slices."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("average", torch.zeros_like(each)).lerp_(each.grad, 0.3)
                each.add_(state["average"], alpha=-group["lr"] * float(each.norm() / (state["average"].norm() + 1)))


def check(world, optimizer_class, **settings):
    options = options_of(optimizer_class) if optimizer_class is not Layerwise else {"lr": 0.1}
    model = net()
    clip = settings.pop("clip", None)
    wrapped, optimizer = make(world, optimizer_class, model, **settings, **options)
    train(world, wrapped, optimizer, range(NUM_STEPS), clip)
    expected, theirs = bare(optimizer_class, NUM_STEPS, clip=clip, **options)
    assert_same(model, expected)
    optimizer.consolidate_state_dict(to=None)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def all_equal(results):
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("shard_gradients", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [
        pytest.param(1, [torch.optim.AdamW], marks=pytest.mark.soak),
        (3, [torch.optim.SGD, torch.optim.Adam]),
        pytest.param(3, ELEMENT, marks=pytest.mark.soak),
    ],
    ids=["one", "two of them", "all"],
)
def test_flat_slices(ranks, num_ranks, kinds, shard_gradients):
    def run(world):
        return torch.cat([check(world, each, shard_gradients=shard_gradients) for each in kinds])

    all_equal(ranks(num_ranks)(run))


def test_whole_parameters(ranks):
    def run(world):
        return torch.cat([check(world, each) for each in (torch.optim.Adafactor, Layerwise)])

    all_equal(ranks(3)(run))


def test_on_shared_memory(ranks):
    def run(world):
        with shm_group() as group:
            found = [
                check(world, torch.optim.AdamW, group=group, shard_gradients=True, clip=0.2),
                check(world, torch.optim.SGD, group=group),
            ]
            return torch.cat(found)

    all_equal(ranks(3)(run))


@pytest.mark.parametrize("settings", [{}, {"shard_gradients": True}, {"engine": nn.parallel.DistributedDataParallel}])
def test_clipping(ranks, settings):
    """torch's engine needs every parameter in every step, so it trains one head."""

    def run(world):
        how = {**settings}
        if "engine" in how:
            engine = how["engine"]
            how["engine"] = lambda model, process_group: engine(
                model, process_group=process_group, find_unused_parameters=True
            )
        return check(world, torch.optim.AdamW, clip=0.2, **how)

    all_equal(ranks(2)(run))
