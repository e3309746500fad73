"""The learning rate at each optimizer step."""

import math

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.step_parts import GradScaler, LearningRate, LossModule, Objective, Rates, batch_scale
from lockstep.train.task import Loss
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, relative_error, token_loss, train, whole_batch


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
    rates = Rates(LearningRate(1.0, 2, 4, "constant"), optimizer)
    rates.advance(0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[1]["lr"] is rate
    assert rate == 0.25
    rate.mul_(0.1)  # as a callback may
    optimizer.param_groups[0]["lr"] = 0.04
    for _ in range(2):
        rates.advance(1)
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.08, 0.05])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigurationError) as error:
        rates.advance(2)
    assert str(error.value) == (
        "The optimizer has 3 param groups, but had 2 when the training began.\nMake all of them in Task.optimizer."
    )


# The loss of a micro-batch, and that of none.


def run(loss, *, precision="fp32"):
    model = nn.Linear(3, 2)
    return Objective(make_task(loss=loss), precision)(model, torch.ones(4, 3), 4)


def test_a_tensor_is_a_mean_over_the_samples():
    part = run(lambda model, batch: model(batch).mean())
    assert (part.weight, part.out_of, type(part.out_of)) == (4.0, 4.0, float)


@pytest.mark.parametrize("count", [3, torch.tensor(3)])
def test_a_loss_counts_what_it_says(count):
    part = run(lambda model, batch: Loss(model(batch).sum(), count))
    assert (part.weight, int(part.out_of), type(part.out_of)) == (1.0, 3, torch.Tensor)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda model, batch: 0.5,
            "The loss returned a float, not a tensor.\nReturn its mean over the batch, or Loss(total, count).",
        ),
        (
            lambda model, batch: model(batch).mean(dim=1),
            "The loss is a tensor of shape (4,), not a single number.\n"
            "Return its mean over the batch, or Loss(total, count).",
        ),
        (
            lambda model, batch: model(batch).detach().mean(),
            "The loss has no gradient: it does not depend on any trainable parameter.\n"
            "Compute it from the model's output, without detach(), item() or no_grad().",
        ),
    ],
)
def test_what_is_no_loss_is_told_so(loss, text):
    with pytest.raises(ConfigurationError) as error:
        run(loss)
    assert str(error.value) == text


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_runs_in_low_precision(precision, dtype):
    seen = []
    run(lambda model, batch: seen.append(model(batch).dtype) or model(batch).float().mean(), precision=precision)
    assert seen == [dtype]


def test_the_loss_of_no_samples_reaches_every_parameter_and_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(math.inf)
    reached = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: reached.append(id(parameter)))
    buffers = [buffer.clone() for buffer in model.buffers()]
    torch.manual_seed(0)
    part = LossModule(model, Objective(make_task(), "fp32"))(None, 0)
    part.value.backward()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))
    assert sorted(reached) == sorted(id(parameter) for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(now, before) for now, before in zip(model.buffers(), buffers, strict=True))
    assert part.value == 0


# Gradient scaling, clipping, and what an overflow does to a step.


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
