"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_reduce
from lockstep.parallel.flat_math import combine_norms, list_norms, multiply_


def norm_of_slices(gradients: Sequence[Tensor], like: Tensor, norm_type: float = 2.0, *, group: Group) -> Tensor:
    """Return the norm of all ranks' ``gradients`` together, a 0-dimensional tensor; the same bits on every rank.

    Collective: every rank, one number. Blocks (on CUDA: the current stream waits).

    Args:
        gradients: This rank's part, maybe none.
        like: A parameter; the result is on its device, and in its dtype, or float32 if that is narrower.
        norm_type: Above 0; may be infinite.
        group: The ranks that take part.
    """
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    total = combine_norms(list_norms(gradients, norm_type), norm_type).to(like.device, wide)
    if math.isinf(norm_type):
        all_reduce(total, group=group, op="max")
    else:
        total = total**norm_type
        all_reduce(total, group=group)
        total = total ** (1.0 / norm_type)
    return total.to(torch.promote_types(like.dtype.to_real(), torch.float32))


def clip_slices_(
    gradients: Sequence[Tensor], like: Tensor, max_norm: float, norm_type: float, *, group: Group
) -> Tensor:
    """Cut all ranks' ``gradients`` together to ``max_norm`` in place; return what their norm was.

    Collective: every rank. Blocks (on CUDA: the current stream waits).
    """
    norm = norm_of_slices(gradients, like, norm_type, group=group)
    multiply_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
