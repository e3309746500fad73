"""Two wrappers that average some of the same parameters in one backward."""

import pytest
import torch
from torch import nn

import lockstep
from tests.models import assert_gradients_equal

CAP_MB = 0.0002  # a bucket a layer


class Branch(nn.Module):
    """A layer of its own behind layers that others may have too."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


def trunk():
    return nn.Sequential(*(nn.Linear(5, 5, dtype=torch.float64) for _ in range(3)))


def wrap(module):
    return lockstep.DistributedDataParallel(module, bucket_cap_mb=CAP_MB)


def nested(world):
    """The inner one trains alone until it has few hooks."""
    inner, oracle = wrap(trunk()), trunk()
    oracle.load_state_dict(inner.module.state_dict())
    for step in range(5):
        one_step(world, [inner], [oracle], step)
    whole = Branch(oracle)
    model = wrap(Branch(inner))
    whole.head.load_state_dict(model.module.head.state_dict())
    return [model], [whole]


def twice(world):
    inner, oracle = wrap(trunk()), trunk()
    oracle.load_state_dict(inner.module.state_dict())
    return [wrap(inner)], [oracle]


def overlapping(world):
    shared = trunk()
    models, oracles = [wrap(Branch(shared)) for _ in range(2)], [Branch(trunk()) for _ in range(2)]
    for model, oracle in zip(models, oracles, strict=True):
        oracle.load_state_dict(model.module.state_dict())
    oracles[1].trunk = oracles[0].trunk
    return models, oracles


def one_step(world, models, oracles, step, zero=True):
    whole = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    for each in [*models, *oracles] if zero else ():
        each.zero_grad()
    sum(model(whole.chunk(world.world_size)[world.rank]).square().mean() for model in models).backward()
    sum(oracle(whole).square().mean() for oracle in oracles).backward()
    for model, oracle in zip(models, oracles, strict=True):
        assert_gradients_equal(model.module, oracle)


def train(world, make):
    torch.manual_seed(0)
    models, oracles = make(world)
    for step in range(9):
        one_step(world, models, oracles, step, zero=step != 7)


@pytest.mark.parametrize("make", [nested, twice, overlapping])
def test_gradients_are_averaged_once(ranks, make):
    ranks(2)(train, make)
