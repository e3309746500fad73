"""What is computed for each element: torch's own kernels, given the statistics of all ranks.

On the CPU those of ``batch_norm`` in evaluation mode serve, which normalise with statistics that they are given and
whose backward yields the two sums that all ranks need. Elsewhere those that torch's ``SyncBatchNorm`` is made of do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.parallel.batchnorm.statistics import Statistics, compute_dtype


def dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return ``tensor`` in a memory format that kernels are fast with: its own, or that of ``like``."""
    return tensor.contiguous(memory_format=_memory_format(tensor if like is None else like))


def _memory_format(tensor: Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


def normalise(input: Tensor, weight: Tensor | None, bias: Tensor | None, batch: Statistics, eps: float) -> Tensor:
    """Return ``(input - mean) / sqrt(var + eps) * weight + bias`` by channel."""
    if input.numel() == 0:
        return torch.empty_like(input)
    dtype = compute_dtype(input)
    weight, bias = _cast(weight, dtype), _cast(bias, dtype)
    if input.device.type == "cpu":
        output: Tensor = torch.native_batch_norm(
            input, weight, bias, batch.mean.to(dtype), batch.var.to(dtype), False, 0.0, eps
        )[0]
        return output
    inverse = torch.rsqrt(batch.var + eps)
    return torch.batch_norm_elemt(input, weight, bias, batch.mean.to(dtype), inverse.to(dtype), eps)


def sums_of_gradient(gradient: Tensor, input: Tensor, batch: Statistics, eps: float) -> Tensor:
    """Return this rank's sums by channel of ``gradient``, then of ``gradient`` times the normalised input: float64."""
    num_channels = input.size(1)
    if input.numel() == 0:
        return torch.zeros(2 * num_channels, dtype=torch.float64, device=input.device)
    dtype = compute_dtype(input)
    if input.device.type == "cpu":
        ones = torch.ones(num_channels, dtype=dtype)
        mean, var = batch.mean.to(dtype), batch.var.to(dtype)
        _, of_product, of_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient, input, ones, mean, var, None, None, False, eps, [False, True, True]
        )
        return torch.cat([of_gradient, of_product]).double()
    inverse = torch.rsqrt(batch.var + eps)
    of_gradient, of_distances, _, _ = torch.batch_norm_backward_reduce(
        gradient, input, batch.mean.to(dtype), inverse.to(dtype), None, True, False, False
    )
    return torch.cat([of_gradient.double(), of_distances * inverse])


def gradient_of_input(
    gradient: Tensor, input: Tensor, weight: Tensor | None, batch: Statistics, sums: Tensor, eps: float
) -> Tensor:
    """Return the gradient with respect to ``input``, given the sums over all ranks of `sums_of_gradient`."""
    if input.numel() == 0:
        return torch.zeros_like(input)
    if input.device.type == "cpu":
        return _on_cpu(gradient, input, weight, batch, sums / batch.total, eps)
    dtype = compute_dtype(input)
    inverse = torch.rsqrt(batch.var + eps)
    of_gradient, of_product = sums.chunk(2)
    return torch.batch_norm_backward_elemt(
        gradient,
        input,
        batch.mean.to(dtype),
        inverse.to(dtype),
        _cast(weight, dtype),
        of_gradient.to(dtype),
        (of_product / inverse).to(dtype),
        batch.total.to(torch.int32).view(1),
    )


def _on_cpu(
    gradient: Tensor, input: Tensor, weight: Tensor | None, batch: Statistics, means: Tensor, eps: float
) -> Tensor:
    """Compute ``scale * (gradient - mean_gradient - normalised * mean_product)`` in two passes."""
    dtype = compute_dtype(input)
    mean_gradient, mean_product = means.chunk(2)
    scale = torch.rsqrt(batch.var + eps)
    if weight is not None:
        scale = scale * weight
    # The second and third term are the input normalised once more, with another weight and bias.
    result: Tensor = torch.native_batch_norm(
        input.to(dtype),
        (-scale * mean_product).to(dtype),
        (-scale * mean_gradient).to(dtype),
        batch.mean.to(dtype),
        batch.var.to(dtype),
        False,
        0.0,
        eps,
    )[0]
    shape = (1, -1) + (1,) * (input.dim() - 2)
    return result.addcmul_(gradient.to(dtype), scale.to(dtype).view(shape)).to(input.dtype)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
