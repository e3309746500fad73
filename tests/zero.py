"""Models, data and oracles that the tests of ZeroRedundancyOptimizer share."""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep import DistributedDataParallel
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from tests.models import relative_error

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
