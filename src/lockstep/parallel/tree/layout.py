"""Flat memory for one gradient of every parameter, laid out the same way whoever sums it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.views import view_like

_ALIGNMENT_BYTES = 512
"""Where each gradient starts: some kernels sum in an order that depends on how the numbers are aligned."""

_CHUNK_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient lies."""

    chunk: int
    offset: int


@dataclass(frozen=True)
class _Chunk:
    """One flat buffer: gradients of one dtype on one device."""

    numel: int
    dtype: torch.dtype


class Layout:
    """Cuts the gradients of ``parameters`` into chunks of about 25 MiB, the last parameters first.

    Args:
        parameters: All on one device.
        multiple_of: What the numel of each chunk divides by: the number of ranks that share its sum.
    """

    def __init__(self, parameters: Sequence[Tensor], *, multiple_of: int = 1) -> None:
        self.parameters = list(parameters)
        self._places: list[_Place] = [_Place(0, 0)] * len(self.parameters)
        sizes: list[list[int]] = []
        dtypes: list[torch.dtype] = []
        open_chunks: dict[torch.dtype, int] = {}
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            padded = _round_up(parameter.numel(), _ALIGNMENT_BYTES // parameter.itemsize)
            chunk = open_chunks.get(parameter.dtype)
            if chunk is None or (sum(sizes[chunk]) + padded) * parameter.itemsize > _CHUNK_BYTES:
                chunk = open_chunks[parameter.dtype] = len(sizes)
                sizes.append([])
                dtypes.append(parameter.dtype)
            self._places[index] = _Place(chunk, sum(sizes[chunk]))
            sizes[chunk].append(padded)
        self._chunks = [
            _Chunk(_round_up(sum(size), multiple_of), dtype) for size, dtype in zip(sizes, dtypes, strict=True)
        ]

    def new_row(self, device: torch.device) -> Row:
        """Return zeros for every gradient."""
        flats = [torch.zeros(chunk.numel, dtype=chunk.dtype, device=device) for chunk in self._chunks]
        views = [
            view_like(flats[place.chunk][place.offset : place.offset + parameter.numel()], parameter)
            for place, parameter in zip(self._places, self.parameters, strict=True)
        ]
        return Row(flats, views)


@dataclass(frozen=True)
class Row:
    """A gradient of every parameter: ``views[i]`` is that of parameter i, in the memory of one of ``flats``."""

    flats: list[Tensor]
    views: list[Tensor]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of a leaf; None is zero."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        missing = [self.views[index] for index, gradient in enumerate(gradients) if gradient is None]
        if present:
            torch._foreach_copy_([self.views[index] for index in present], _present(gradients))
        if missing:
            torch._foreach_zero_(missing)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a leaf; None is zero, which is added too: it makes 0 of -0, as a row of zeros does."""
        for dtype in {view.dtype for view in self.views}:
            present = [i for i, g in enumerate(gradients) if g is not None and self.views[i].dtype is dtype]
            if present:
                torch._foreach_add_([self.views[i] for i in present], _present([gradients[i] for i in present]))
        missing = [self.views[index] for index, gradient in enumerate(gradients) if gradient is None]
        if missing:
            torch._foreach_add_(missing, 0)

    def add_row(self, other: Row) -> None:
        """Add ``other``, which is on the same device."""
        for flat, addend in zip(self.flats, other.flats, strict=True):
            flat.add_(addend)


def _present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
