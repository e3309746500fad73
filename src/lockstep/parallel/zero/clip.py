"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_reduce


def norm_of_slices(
    gradients: Sequence[Tensor], norm_type: float = 2.0, *, group: Group | None, device: torch.device
) -> Tensor:
    """Return the norm of all ranks' ``gradients`` together, a 0-dimensional tensor.

    Collective: every rank, one number. Blocks (on CUDA: the current stream waits).
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    # the norm of norms in each rank as torch computes it, so that small gradients of many elements do not vanish
    mine = torch.nn.utils.get_total_norm(list(gradients), norm_type) if gradients else torch.zeros(())
    dtype = mine.dtype if gradients else None
    total = mine.to(device, wide)
    if math.isinf(norm_type):
        if group is not None:
            all_reduce(total, group=group, op="max")
    else:
        total = total**norm_type
        if group is not None:
            all_reduce(total, group=group)
        total = total ** (1.0 / norm_type)
    return total if dtype is None else total.to(dtype)


def clip_slices_(
    gradients: Sequence[Tensor], max_norm: float, norm_type: float, *, group: Group, device: torch.device
) -> Tensor:
    """Cut all ranks' ``gradients`` together to ``max_norm`` in place; return what their norm was.

    Collective: every rank. Blocks (on CUDA: the current stream waits).
    """
    norm = norm_of_slices(gradients, norm_type, group=group, device=device)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.real.dtype if gradient.is_complex() else gradient.dtype))
    return norm


def clip_whole_(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Do the same where every rank has all gradients."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
