"""The learning rate at each optimizer step."""

import math

import pytest
import torch
from torch import nn

from lockstep.train.step import LearningRate, batch_scale, set_rates


def factors(num_steps=6, **changes):
    rate = LearningRate(**{"scale": 1.0, "warmup": 0, "num_steps": num_steps, "decay": "constant", **changes})
    return [rate.factor(step) for step in range(num_steps)]


def test_constant():
    assert factors() == [1.0] * 6


def test_linear_falls_to_zero_just_after_the_last_step():
    assert factors(4, decay="linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine():
    assert factors(4, decay="cosine") == pytest.approx([1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2])


def test_warm_up_rises_to_the_whole_rate_and_the_fall_comes_after_it():
    assert factors(6, warmup=2, decay="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_the_scale_multiplies_all_of_it():
    assert factors(6, warmup=2, decay="linear", scale=3.0) == [1.5, 3.0, 3.0, 2.25, 1.5, 0.75]


def test_the_tasks_own_schedule_gets_step_and_number_of_steps_and_is_warmed_up_too():
    assert factors(4, warmup=2, decay=lambda step, num_steps: 10 * step + num_steps) == [2.0, 14.0, 24.0, 34.0]


def test_steps_beyond_the_last_stay_at_the_end():
    assert LearningRate(scale=1.0, warmup=0, num_steps=2, decay="linear").factor(7) == 0.0


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_rules_for_a_larger_batch(rule, factor):
    assert batch_scale(rule, 128, 32) == factor


def test_every_group_keeps_its_own_base_rate_and_a_rate_that_is_a_tensor_stays_one():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": rate}])
    base = [float(group["lr"]) for group in optimizer.param_groups]
    assert base == [0.1, 0.5]
    set_rates(optimizer, base, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[1]["lr"] is rate
    assert rate == 0.25
