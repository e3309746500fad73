"""What is computed for each element: torch's own kernels, given the statistics of all ranks.

On the CPU those of ``batch_norm`` in evaluation mode serve, which normalise with statistics that they are given and
whose backward yields the two sums that all ranks need. Elsewhere those that torch's ``SyncBatchNorm`` is made of do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.parallel.batchnorm.statistics import Statistics


def dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return ``tensor`` in a memory format that kernels are fast with: its own, or that of ``like``."""
    return tensor.contiguous(memory_format=_memory_format(tensor if like is None else like))


def _memory_format(tensor: Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


def normalise(input: Tensor, weight: Tensor | None, bias: Tensor | None, batch: Statistics, eps: float) -> Tensor:
    """Return ``(input - mean) / sqrt(var + eps) * weight + bias`` by channel.

    Args:
        input: Of any floating dtype.
        weight: By channel; None: one.
        bias: By channel; None: zero.
        batch: In the dtype that `compute_dtype` says; so in the functions below.
        eps: Added to the variance.
    """
    if input.numel() == 0:
        return torch.empty_like(input)
    weight, bias = _cast(weight, batch), _cast(bias, batch)
    if input.device.type == "cpu":
        return _affine(input, weight, bias, batch, eps)
    return torch.batch_norm_elemt(input, weight, bias, batch.mean, torch.rsqrt(batch.var + eps), eps)


def sums_of_gradient(gradient: Tensor, input: Tensor, batch: Statistics, eps: float) -> Tensor:
    """Return this rank's sums by channel of ``gradient``, then of ``gradient`` times the normalised input: float64."""
    if input.numel() == 0:
        return torch.zeros(2 * input.size(1), dtype=torch.float64, device=input.device)
    if input.device.type == "cpu":
        ones = torch.ones_like(batch.mean)
        _, of_product, of_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient, input, ones, batch.mean, batch.var, None, None, False, eps, [False, True, True]
        )
        return torch.cat([of_gradient, of_product]).double()
    inverse = torch.rsqrt(batch.var + eps)
    of_gradient, of_distances, _, _ = torch.batch_norm_backward_reduce(
        gradient, input, batch.mean, inverse, None, True, False, False
    )
    return torch.cat([of_gradient, of_distances * inverse]).double()


def gradient_of_input(
    gradient: Tensor, input: Tensor, weight: Tensor | None, batch: Statistics, sums: Tensor, eps: float
) -> Tensor:
    """Return the gradient with respect to ``input``, given the sums over all ranks of `sums_of_gradient`."""
    if input.numel() == 0:
        return torch.zeros_like(input)
    weight = _cast(weight, batch)
    inverse = torch.rsqrt(batch.var + eps)
    if input.device.type == "cpu":
        scale = inverse if weight is None else inverse * weight
        means = (sums / batch.total).to(scale.dtype)
        return _gradient_on_cpu(gradient, input, batch, scale, means, eps)
    of_gradient, of_product = sums.to(inverse.dtype).chunk(2)
    return torch.batch_norm_backward_elemt(
        gradient,
        input,
        batch.mean,
        inverse,
        weight,
        of_gradient,
        of_product / inverse,
        batch.total.to(torch.int32).view(1),
    )


def _gradient_on_cpu(
    gradient: Tensor, input: Tensor, batch: Statistics, scale: Tensor, means: Tensor, eps: float
) -> Tensor:
    """Return ``scale * (gradient - mean gradient - normalised input * mean product)``, in two passes."""
    dtype = scale.dtype
    mean_gradient, mean_product = (means.view(2, -1) * -scale).unbind()
    # The second and third term are the input normalised once more, with another weight and bias.
    result = _affine(input.to(dtype), mean_product, mean_gradient, batch, eps)
    shape = (1, -1) + (1,) * (input.dim() - 2)
    return result.addcmul_(gradient.to(dtype), scale.view(shape)).to(input.dtype)


def _affine(input: Tensor, weight: Tensor | None, bias: Tensor | None, batch: Statistics, eps: float) -> Tensor:
    output: Tensor = torch.native_batch_norm(input, weight, bias, batch.mean, batch.var, False, 0.0, eps)[0]
    return output


def _cast(tensor: Tensor | None, batch: Statistics) -> Tensor | None:
    return None if tensor is None else tensor.to(batch.mean.dtype)
