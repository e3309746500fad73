"""Views of flat memory for gradients."""

from __future__ import annotations

from torch import Tensor


def view_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """Return the flat ``piece`` in the shape of ``parameter``; dense strides such as channels_last are kept.

    autograd accumulates fastest, and without a warning, into gradients with the strides of their parameter.
    """
    by_stride = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(by_stride).is_contiguous():
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)  # it overlaps itself or has gaps
