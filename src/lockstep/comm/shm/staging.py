"""Bring tensors into the form that the C library takes: contiguous, on the CPU, as addresses and sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from types import TracebackType

from torch import Tensor

from lockstep.errors import ConfigurationError


class Staged:
    """A context manager that gives contiguous tensors; those that had to be copied are copied back at its end.

    Args:
        tensors: Strided, on the CPU.
        write_back: Whether the tensors are written to.
    """

    def __init__(self, tensors: Sequence[Tensor], *, write_back: bool = True) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._write_back = write_back

    def __enter__(self) -> list[Tensor]:
        # Bits that are set lazily (conjugate, negative) are no bits in memory.
        self._staged = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in self._tensors]
        return self._staged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._write_back:
            for tensor, staged in zip(self._tensors, self._staged, strict=True):
                if staged.data_ptr() != tensor.data_ptr() or staged.stride() != tensor.stride():
                    tensor.copy_(staged)


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses for C; the tensors must outlive the call."""
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def sizes(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_uint64]:
    """Return the sizes in bytes for C; no tensor is none."""
    return (ctypes.c_uint64 * len(tensors))(*(0 if tensor is None else tensor.nbytes for tensor in tensors))


def rows(tensor: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Cut a contiguous tensor into flat pieces of so many elements."""
    flat, start = tensor.view(-1), 0
    for count in counts:
        yield flat[start : start + count]
        start += count


def check_equal_sizes(name: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Check that ``whole`` has room for the ``part`` of each rank.

    Raises:
        ConfigurationError: It has not, or is of another dtype.
    """
    if whole.dtype != part.dtype:
        raise ConfigurationError(f"{name}: both tensors must have one dtype; they have {whole.dtype} and {part.dtype}.")
    if whole.numel() != part.numel() * size:
        raise ConfigurationError(
            f"{name}: the large tensor must have {size} times as many elements as the small one, one part for each "
            f"rank; they have {whole.numel()} and {part.numel()}."
        )
