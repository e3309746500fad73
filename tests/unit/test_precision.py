"""Gradient scaling, clipping, and what an overflow does to a step."""

import math

import pytest
import torch

from lockstep.train.settings import Settings
from lockstep.train.step import GradScaler
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, relative_error, token_loss, train, whole_batch


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


@pytest.mark.parametrize("clip", [0.1, 100.0])
def test_clipping_is_that_of_torch(clip):
    task = make_task()
    found, expected = train(None, task, "single", 3, clip=clip), whole_batch(task, 3, clip=clip)
    for ours, theirs in zip(found["grads"], expected["grads"], strict=True):
        assert relative_error(ours, theirs) < 1e-12


def test_divisor_loss_scale_and_clip_are_one_factor():
    """In float64, which autocast leaves alone."""
    task = make_task(loss=token_loss)
    found, expected = train(None, task, "single", 3, precision="fp16", clip=0.1), whole_batch(task, 3, clip=0.1)
    for ours, theirs in zip(found["grads"], expected["grads"], strict=True):
        assert relative_error(ours, theirs) < 1e-12
    assert relative_error(found["weights"], expected["weights"]) < 1e-12


def test_an_overflow_leaves_the_weights_and_the_schedule_where_they_are():
    calls = []

    def overflows_once(model, batch):
        calls.append(1)
        return mean_loss(model, batch) * (math.inf if len(calls) == 2 else 1.0)

    settings = Settings(precision="fp16", warmup=4, check_replicas=0)
    loop = Trainer(make_task(loss=overflows_once), settings, None, strategy="single", devices=[torch.device("cpu")])
    seen = []
    for _ in range(3):
        updated = loop.step().updated
        seen.append((updated, loop.optimizer.param_groups[0]["lr"], loop.model[0].weight.detach().clone()))
    assert [updated for updated, _, _ in seen] == [True, False, True]
    assert torch.equal(seen[0][2], seen[1][2])
    first, _, third = (rate for _, rate, _ in seen)
    assert (first, third) == pytest.approx((0.1 / 4, 0.1 * 2 / 4))
    assert loop.state_dict()["scaler"] == {"scale": 2.0**15, "num_good_steps": 1, "growth_interval": 2000}
