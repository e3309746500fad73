"""Tensors that lie in memory which all ranks of a group map, so that they are reduced where they lie."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.comm.shm.member import Member

PAGE_BYTES = 4096
Place = tuple[int, int, ctypes.Array[ctypes.c_void_p] | None]
"""Number of an allocation, offset in a rank's share of it, and where the ranks' shares lie."""
NOWHERE: Place = (-1, 0, None)
"""In this process's own memory."""


@dataclass(frozen=True)
class _Allocation:
    """Memory with a share for each rank; this rank's lies from ``start`` to ``end`` in its address space."""

    number: int
    start: int
    end: int
    parts: ctypes.Array[ctypes.c_void_p]
    memory: weakref.ref[mmap.mmap]


class Buckets:
    """The allocations of one group that are still in use in this process."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._allocations: list[_Allocation] = []
        self._num_made = 0

    def add(self, memory: mmap.mmap, address: int, share_bytes: int) -> None:
        """Remember an allocation; as all ranks make them in the same order, they give it the same number."""
        size, rank = self._member.size, self._member.rank
        parts = (ctypes.c_void_p * size)(*(address + index * share_bytes for index in range(size)))
        start = address + rank * share_bytes
        self._allocations = [known for known in self._allocations if known.memory() is not None]
        self._allocations.append(_Allocation(self._num_made, start, start + share_bytes, parts, weakref.ref(memory)))
        self._num_made += 1

    def find_row(self, whole: Tensor, parts: Sequence[Tensor], own: Tensor) -> Place:
        """Return where ``whole`` lies, if ``own`` is this rank's among its ``parts``."""
        return self.find(whole) if parts[self._member.rank].data_ptr() == own.data_ptr() else NOWHERE

    def find(self, tensor: Tensor) -> Place:
        """Return where a contiguous tensor lies."""
        address = tensor.data_ptr()
        for known in self._allocations:
            if known.start <= address < known.end and known.memory() is not None:
                return known.number, address - known.start, known.parts
        return NOWHERE
