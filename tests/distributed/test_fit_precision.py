"""Low precision on several ranks: every decision is everyone's."""

import math

import pytest
import torch
from torch import nn

from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task

NUM_STEPS = 4


def network():
    """Return a network in float32, as autocast wants it."""
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def samples():
    """Return inputs, targets, and zeros."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(48, 6, generator=generator), torch.randn(48, 4, generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets, torch.zeros(48))


def loss(model, batch):
    """Return the mean over the samples; outputs are in low precision."""
    return (model(batch[0]).float() - batch[1]).square().mean()


TASK = make_task(model=network, dataset=samples, loss=loss)


def run(world, strategy, precision, task=TASK, num_steps=NUM_STEPS):
    """Return each step's loss and whether it updated, the weights, and the loss scale."""
    devices = [torch.device("cpu")] * (2 if strategy == "dp" else 1)
    loop = Trainer(task, Settings(precision=precision, clip=10.0), world, strategy=strategy, devices=devices)
    records = [loop.step() for _ in range(num_steps)]
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    scaler = loop.state_dict()["scaler"]
    return [float(record.loss) for record in records], [record.updated for record in records], weights, scaler


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_as_in_full_precision_and_the_ranks_stay_alike(ranks, precision):
    whole, _, exact, _ = run(None, "single", "fp32")
    for strategy in ("single", "dp"):
        losses, updated, weights, _ = run(None, strategy, precision)
        assert losses == pytest.approx(whole, rel=0.02)
        assert updated == [True] * NUM_STEPS
        assert 0 < (weights - exact).norm() / exact.norm() < 0.01

    def both(world):
        return [run(world, strategy, precision) for strategy in ("ddp", "torch-ddp")]

    results = ranks(2)(both)
    for index in range(2):
        (losses, updated, weights, scaler), other = results[0][index], results[1][index]
        assert losses == pytest.approx(whole, rel=0.02)
        assert updated == [True] * NUM_STEPS
        assert 0 < (weights - exact).norm() / exact.norm() < 0.01
        assert (losses, scaler) == (other[0], other[3])
        assert torch.equal(weights, other[2])
        expected = (
            {"scale": 2.0**16, "num_good_steps": NUM_STEPS, "growth_interval": 2000} if precision == "fp16" else None
        )
        assert scaler == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, num_ranks):
    """The last rank's part of the second step overflows; the step after it is taken with half the scale."""

    def overflow(world):
        calls = []

        def sometimes_too_large(model, batch):
            calls.append(1)
            too_large = world.rank == world.world_size - 1 and len(calls) == 2
            return loss(model, batch) * (math.inf if too_large else 1.0)

        task = make_task(model=network, dataset=samples, loss=sometimes_too_large)
        return run(world, "ddp", "fp16", task)

    results = ranks(num_ranks)(overflow)
    for _, updated, weights, scaler in results:
        assert updated == [True, False, True, True]
        assert scaler == {"scale": 2.0**15, "num_good_steps": 2, "growth_interval": 2000}
        assert torch.equal(weights, results[0][2])
        assert weights.isfinite().all()
