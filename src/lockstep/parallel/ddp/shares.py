"""The share of this rank in the batch that a forward was given: what `lockstep.prepare` knows of it, and its effect.

[Note: shares]
A loader that divides global batches knows how the parts of the ranks count: the share of a rank is its number of
samples, divided by the mean number of all ranks. The gradient of a step is the mean over the ranks of share * g, where
g is the gradient of the rank's mean loss. The shares of a batch have the mean 1, so the ranks exchange nothing.

The share belongs to a forward, not to a backward: forwards of several batches may end in one loss. So inside the model
all gradients are share * g, and outside of it they are g. A gradient that enters through an output is multiplied by the
share; one that leaves through an input (another model's output, an input that requires a gradient) is divided by it.
Forwards in sequence (an encoder and a decoder, a generator and its judge) are then right, and so is what autograd.grad
returns for an input. If that gradient is differentiated again (a gradient penalty), this second backward comes into the
model through the gradient that left: what then flows inside must be share * g again, which it is if neither step
changes the gradient of the gradient. With the share 0 nothing enters, and nothing leaves: the sample is that of another
rank.

If the backward has a weight (weighting.py), the weight counts, and the share only says whether it is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.base.containers import find_tensors, map_tensors
from lockstep.errors import ConfigurationError


class BatchPart(NamedTuple):
    """This rank's part of a global batch.

    Args:
        share: Its number of samples, divided by the mean number of all ranks; 0: its only sample does not count.
        kind: 0 if all ranks have the same share, else the size of the global batch; None: not known.
        digest: 16 bits of what all ranks have read for the global batch.
        name: Of the batch, in errors.
        problem: Why the share is not known, if so.
    """

    share: float
    kind: int | None
    digest: int
    name: str
    problem: str = ""


class BatchesInUse(Protocol):
    """Knows which batch a forward is given."""

    def of_forward(self, arguments: Any, *, trains: bool) -> BatchPart | None:
        """Return its part; None: it is given no batch of a prepared loader."""

    def of_output(self, output: Any, part: BatchPart) -> None:
        """Record what the forward of a part has returned."""


class _Scaled(Function):
    """A gradient that crosses the edge of a model; see [Note: shares]."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: float) -> Tensor:
        ctx.counts = factor != 0
        return gradient * factor if factor else torch.zeros_like(gradient)  # 0 * NaN is NaN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.counts else torch.zeros_like(gradients[0]), None


class _Leaving(Function):
    """An input of a forward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        factor = ctx.scaling.factor
        return gradients[0] if factor == 1 else _Scaled.apply(gradients[0], 1 / factor if factor else 0.0), None  # type: ignore[no-untyped-call]


class Scaling:
    """Scales the gradients of one forward.

    Args:
        part: Of the batch that the forward was given.
        in_training_mode: Whether the model was in training mode.

    Attributes:
        factor: Of the gradients inside the model, in the newest backward.
    """

    def __init__(self, part: BatchPart, *, in_training_mode: bool) -> None:
        self.part, self.in_training_mode, self.factor = part, in_training_mode, 1.0

    def of_inputs(self, inputs: Any) -> Any:
        """Return the arguments of the forward, so that gradients are divided when they leave."""
        if self.part.share == 1 or not any(tensor.requires_grad for tensor in find_tensors(inputs)):
            return inputs
        return map_tensors(inputs, lambda tensor: _Leaving.apply(tensor, self) if tensor.requires_grad else tensor)  # type: ignore[no-untyped-call]

    def entering(self, gradient: Tensor, *, has_weight: bool) -> Tensor:
        """Return the gradient inside the model for that of an output.

        Raises:
            ConfigurationError: The share is not known.
        """
        share = self.part.share
        if self.part.problem and not has_weight:
            raise ConfigurationError(self.part.problem)
        self.factor = 1.0 if has_weight else share
        return gradient if self.factor == 1 else _Scaled.apply(gradient, self.factor)  # type: ignore[no-untyped-call]
