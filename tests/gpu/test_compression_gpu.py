"""Compressed gradients of a GPU pass through the host; over many steps nothing is lost."""

import pytest
import torch
from torch import nn

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def steps(world, method):
    """Two ranks on one GPU, over Gloo: return the sums of what came and of what was given, and the residual."""
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Linear(300, 40).cuda(), compression=method)
    came = given = torch.zeros(40, 300)
    for step in range(10):
        model.zero_grad()
        inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + world.rank))
        model(inputs.cuda()).sum().backward()
        came = came + model.module.weight.grad.cpu()
        given = given + inputs.sum(0).expand(40, 300)
    return came, given, model.compression_state_dict()["residuals"]["weight"]


@pytest.mark.parametrize("method", ["int8", "int4", "powersgd:2"])
def test_the_sum_over_the_steps_is_exact_but_for_the_residuals(ranks, method):
    first, second = ranks(2)(steps, method)
    assert torch.equal(first[0], second[0])
    left = first[2] + second[2]
    assert left.any()
    assert torch.allclose(first[0] + left, (first[1] + second[1]) / 2, rtol=0, atol=1e-3)
