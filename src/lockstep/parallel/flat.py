"""Flat gradients: views like a parameter, norms and factors in few kernels, the same bits on any number of threads."""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter, methodcaller

import torch
from torch import Tensor

from lockstep.base.containers import grouped
from lockstep.base.torch_internals import foreach_mul_, foreach_norm

# What vectorised loads need of an address, and some libraries require. Torch's allocators align memory to more. Tensors
# whose size is no multiple of it come last in flat memory, so that all others are aligned.
ALIGNMENT_BYTES = 16


def padded_numel(numel: int, itemsize: int, num_slices: int) -> int:
    """Return ``numel`` rounded up to what equal slices divide, each of a multiple of 16 bytes, and of at least 16."""
    unit = num_slices * max(ALIGNMENT_BYTES // itemsize, 1)
    return -(-max(numel, 1) // unit) * unit


def order_in_memory(parameter: Tensor) -> list[int] | None:
    """Return the dimensions from the largest stride to the smallest; None if it overlaps itself or has gaps."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else None


def view_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """Return the flat ``piece`` in the shape of ``parameter``; dense strides such as channels_last are kept."""
    if order_in_memory(parameter) is None:
        return piece.view(parameter.shape)
    # autograd accumulates fastest, and without a warning, into gradients with the strides of their parameter.
    return piece.as_strided(parameter.shape, parameter.stride())


def cut_views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Split ``flat`` into views like the parameters; see `view_like`."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [view_like(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def flatten_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of ``value`` in the memory order of ``parameter``, which has the same shape.

    The inverse of `view_like`. A view if ``value`` has the strides of the parameter.
    """
    order = order_in_memory(parameter)
    return value.reshape(-1) if order is None else value.permute(order).reshape(-1)


_ROW = 4096
_SHORT = 2**15  # up to here torch uses one thread


def flat_norm(flat: Tensor, norm_type: float = 2.0) -> Tensor:
    """Return the norm of a 1-dimensional tensor, a 0-dimensional one; float16 and bfloat16 give float32.

    Args:
        flat: Contiguous, real or complex.
        norm_type: Above 0; may be infinite.
    """
    if flat.numel() == 0:
        return torch.zeros((), dtype=flat.dtype.to_real(), device=flat.device)
    dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else None
    if flat.device.type != "cpu":
        # A kernel over chunks of a fixed size and one over the chunks, so the bits do not depend on the kind of GPU.
        # Source: ATen/native/cuda/ForeachReduceOp.cu.
        return foreach_norm([flat], norm_type, dtype=dtype)[0]
    # torch's ``vector_norm`` adds the squares of millions of numbers to a few running sums, which loses four digits in
    # float32. The number of running sums depends on the number of threads, so ranks with different numbers of threads
    # would clip by different factors. Here the tensor is split into rows, one thread sums each row, and the rows' norms
    # form one short vector (or rows again). That takes the same time without the loss.
    while flat.numel() > _SHORT:
        num_rows = flat.numel() // _ROW
        rows, tail = flat[: num_rows * _ROW].view(num_rows, _ROW), flat[num_rows * _ROW :]
        norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)
        if tail.numel():
            norms = torch.cat([norms, torch.linalg.vector_norm(tail, norm_type, dtype=dtype).view(1)])
        flat, dtype = norms, None
    norm: Tensor = torch.linalg.vector_norm(flat, norm_type, dtype=dtype)
    return norm


def total(flat: Tensor) -> Tensor:
    """Return the sum of a tensor as a 0-dimensional tensor: NaN or infinite if an element is. Does not block."""
    # One pass at memory speed, also on CPUs, where torch takes 25 times as long to find the largest element. A sum of
    # finite elements overflows only if the elements are close to overflow themselves.
    return flat.sum(dtype=torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else None)


def combine_norms(norms: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Combine the norms of tensors into the norm of all, on the device of the first; zero if there are none."""
    if not norms:
        return torch.tensor(0.0)
    on_first = map(methodcaller("to", norms[0].device), norms)
    combined: Tensor = torch.linalg.vector_norm(torch.stack(list(on_first)), norm_type)
    return combined


def list_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Return the norms of ``tensors``, for `combine_norms`: one call for each large tensor, one for all small ones."""
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    small = [value for value in values if 0 < value.numel() <= _SHORT]
    norms = [flat_norm(flatten_like(value, value), norm_type) for value in values if value.numel() > _SHORT]
    if small:
        norms.append(torch.nn.utils.get_total_norm(small, norm_type))
    return norms


def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place by a 0-dimensional tensor; do nothing if it is known to be 1."""
    if factor.device.type == "cpu" and factor.item() == 1:  # on CUDA this check would make the host wait
        return
    for (device, dtype, is_sparse), group in grouped(grads, attrgetter("device", "dtype", "is_sparse")).items():
        local = factor.to(device, dtype)
        if is_sparse:
            for grad in group:
                grad.mul_(local)
        else:
            foreach_mul_(group, local)


def are_finite(tensors: Iterable[Tensor], norm: Tensor | None = None) -> bool:
    """Return whether all elements are finite. ``norm`` is their norm times a finite factor, if known.

    Blocks on CUDA. All ranks with the same gradients return the same value.
    """
    if norm is not None and math.isfinite(float(norm)):
        return True
    # The sum of squares may overflow on one machine and not on another, so the elements are checked.
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return all(bool(torch.isfinite(value.coalesce().values() if value.is_sparse else value).all()) for value in floats)
