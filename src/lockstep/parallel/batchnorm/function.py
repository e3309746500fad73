"""The part of the layer that autograd sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.parallel.batchnorm.engine import Event
from lockstep.parallel.batchnorm.exchange import Exchange
from lockstep.parallel.batchnorm.kernels import dense, gradient_of_input, normalise, sums_of_gradient
from lockstep.parallel.batchnorm.statistics import Statistics, compute_dtype


class Normalise(torch.autograd.Function):
    """Normalises with the statistics of all ranks, of which the input is a part.

    The loss depends on an input through every output of its channel, on all ranks, so the backward sums two numbers a
    channel over the ranks. The gradients of weight and bias are this rank's part only.

    If an engine multiplies a rank's gradients by a weight when backward is over, so as to give the gradient of the
    weighted sum of the ranks' losses, the other ranks' terms must be in that unit already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: Statistics,
        eps: float,
        exchange: Exchange,
    ) -> Tensor:
        """Return the normalised input; see `normalise`."""
        batch = batch.to(compute_dtype(input))
        ctx.save_for_backward(input, weight, *batch)
        ctx.eps, ctx.exchange = eps, exchange
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        return normalise(input, weight, bias, batch, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients. Collective if the input requires one: every rank. Blocks."""
        input, weight, *statistics = ctx.saved_tensors
        batch = Statistics(*statistics)
        gradient = dense(gradient, like=input)
        mine = sums_of_gradient(gradient, input, batch, ctx.eps)
        of_bias, of_weight = mine.chunk(2)
        of_input = None
        if ctx.needs_input_grad[0]:
            ctx.exchange.announce(Event.BACKWARD)
            sums = _sum(ctx.exchange, mine)
            of_input = gradient_of_input(gradient, input, weight, batch, sums, ctx.eps)
        return (
            of_input,
            of_weight.to(ctx.dtypes[0]) if ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.dtypes[1]) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _sum(exchange: Exchange, mine: Tensor) -> Tensor:
    """Return the sums over the ranks, in this rank's unit. Collective: every rank. Blocks."""
    unit = exchange.unit
    return exchange.sum(mine) if unit == 1 else exchange.sum(mine * unit) / unit
