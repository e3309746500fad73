"""The task's loss, as every strategy computes it: under autocast, checked, and with what it counts for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError
from lockstep.train.precision import autocast
from lockstep.train.settings import Precision
from lockstep.train.task import Loss, Task


class Part(NamedTuple):
    """The loss of one micro-batch: ``value * weight`` out of ``out_of`` is what it adds to the loss of the step.

    A mean over samples has their number as weight and count; a `Loss` has weight 1 and its own count.
    """

    value: Tensor
    weight: float
    out_of: Tensor | float

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over samples, whose count is known without asking the other ranks."""
        return isinstance(self.out_of, float)


@dataclass(frozen=True)
class Objective:
    """Computes the loss of ``task`` for a micro-batch; safe to call from several threads at once."""

    task: Task
    precision: Precision

    def __call__(self, model: nn.Module, batch: object, num_samples: int) -> Part:
        """Return the loss of ``model`` on ``batch``.

        Raises:
            ConfigurationError: It is no 0-dimensional tensor, or has no gradient.
        """
        with autocast(self.precision, _device_of(model)):
            result: object = self.task.loss(model, batch)
        if isinstance(result, Loss):
            value, count = result.total, torch.as_tensor(result.count)
            part = Part(value, 1.0, count)
        elif isinstance(result, Tensor):
            part = Part(result, float(num_samples), float(num_samples))
        else:
            raise ConfigurationError(
                f"The loss returned a {type(result).__name__}, no tensor.\n"
                "Return its mean over the batch, or Loss(total, count)."
            )
        if part.value.dim() != 0:
            raise ConfigurationError(
                f"The loss is a tensor of shape {tuple(part.value.shape)}, not a single number.\n"
                "Return its mean over the batch, or Loss(total, count)."
            )
        if torch.is_grad_enabled() and not part.value.requires_grad:
            raise ConfigurationError(
                "The loss has no gradient: it does not depend on any trainable parameter.\n"
                "Compute it from the model's output, without detach(), item() or no_grad()."
            )
        return part


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


class LossModule(nn.Module):
    """The model with its loss as one module, for engines that wrap a module.

    So the loss gets the bare model, whatever the engine: it may use its attributes and methods, and call it often.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: object, num_samples: int) -> Part:
        """Return the loss on ``batch``; without samples, one that has every parameter in its graph but no gradient."""
        if num_samples == 0:
            parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return Part(no_samples(parameters), 1.0, 0.0)
        return self._objective(self.model, batch, num_samples)


class _NoSamples(torch.autograd.Function):
    """Zero, whose backward reaches every parameter and gives it no gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)  # type: ignore[attr-defined]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grad: Tensor) -> tuple[None, ...]:
        num_parameters: int = ctx.num_parameters  # type: ignore[attr-defined]
        return (None,) * num_parameters


def no_samples(parameters: list[nn.Parameter]) -> Tensor:
    """Return zero as the loss of no samples.

    A rank whose part of the last global batch is empty must still take part in the collectives of the backward pass.
    Running the model on a made-up sample would move its batch-norm statistics and random state, and zero times a loss
    that is not finite is no zero; this touches neither, and each parameter's hooks run all the same.
    """
    loss: Tensor = _NoSamples.apply(*parameters)  # type: ignore[no-untyped-call]
    return loss
