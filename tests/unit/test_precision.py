"""Gradient scaling, clipping, and what an overflow does to a step."""

import math

import pytest
import torch
from torch import nn

from lockstep.parallel.flat import combine_norms, list_norms, multiply_
from lockstep.train.step import GradScaler, clip_factor


def test_the_scale_is_halved_after_an_overflow_and_doubled_after_a_good_while():
    scaler = GradScaler(scale=8.0, growth_interval=3)
    seen = []
    for finite in (True, False, True, True, True, True):
        scaler.update(finite=finite)
        seen.append((scaler.scale, scaler.num_good_steps))
    assert seen == [(8.0, 1), (4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0), (8.0, 1)]


def test_the_scale_stays_within_bounds():
    low, high = GradScaler(scale=1.0), GradScaler(scale=2.0**24, growth_interval=1)
    low.update(finite=False)
    high.update(finite=True)
    assert (low.scale, high.scale) == (1.0, 2.0**24)


def test_the_state_of_the_scaler_comes_back():
    scaler, other = GradScaler(scale=4.0, num_good_steps=7), GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other == scaler


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_is_that_of_torch(max_norm):
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    grads = [parameter.grad.clone() for parameter in parameters]
    norm = combine_norms(list_norms(grads))
    multiply_(grads, clip_factor(norm, max_norm))
    assert norm.item() == pytest.approx(math.sqrt(20))
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for ours, parameter in zip(grads, parameters, strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=0)
