"""The loss of a micro-batch, and that of none."""

import math

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.train.step import LossModule, Objective
from lockstep.train.task import Loss
from tests.training import make_task


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
