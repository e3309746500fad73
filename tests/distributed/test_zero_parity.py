"""A divided optimizer does what the bare one does on the whole batch, and all ranks hold the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import DistributedDataParallel
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.parallel.zero.partition import ELEMENTWISE
from tests.models import relative_error
from tests.shm import shm_group

# --- models, data and oracles that the tests of ZeroRedundancyOptimizer share

BATCH = 12


class Net(nn.Module):
    """Odd sizes, a tied layer, a scalar, channels_last, and a head that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first, self.middle = nn.Linear(5 * 4, 7), nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.heads = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        hidden = torch.tanh(self.first(torch.relu(self.conv(x)).flatten(1)))
        return self.heads[head](torch.tanh(self.middle(self.middle(hidden))) * self.scale)


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 3, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, step: int, rank: int = 0, size: int = 1, head: int | None = None) -> Tensor:
    inputs, targets = (part.chunk(size)[rank] for part in batch(step))
    return (model(inputs, step % 2 if head is None else head) - targets).square().mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases in groups of their own, so that they take turns in every buffer."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.004, "weight_decay": 0.0}]


def bare(optimizer_class: type, num_steps: int, model: nn.Module | None = None, clip: float | None = None, **options):
    """Train on the whole batch in this process; return the model and its optimizer."""
    model = net() if model is None else model
    optimizer = optimizer_class(groups_of(model), **options)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def make(
    world, optimizer_class, model, *, group=None, shard_gradients=False, engine=DistributedDataParallel, **options
):
    """Return ``model`` wrapped, and its divided optimizer."""
    group = world.group if group is None else group
    wrapped = engine(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        groups_of(model), optimizer_class, process_group=group, shard_gradients=shard_gradients, **options
    )
    return wrapped, optimizer


def train(world, wrapped, optimizer, steps, clip=None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(wrapped, step, world.rank, world.world_size).backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, mine), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert relative_error(mine.detach(), other.detach()) < 1e-12, name


def assert_same_state(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two state dicts of optimizers."""
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for index, entries in other["state"].items():
        assert mine["state"][index].keys() == entries.keys()
        for name, value in entries.items():
            found = mine["state"][index][name]
            if not isinstance(value, Tensor):
                assert found == value
                continue
            assert found.shape == value.shape
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-13)


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
