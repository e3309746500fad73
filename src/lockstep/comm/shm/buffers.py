"""`empty_shared`: buckets that an all-reduce neither copies in nor out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm import communicator
from lockstep.comm.shm.ops import PAGE_BYTES, NativeCall, OpRunner
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.comm.shm.segment import TOKEN_BYTES, NoSharedMemory, Offer, Segment, make_segment, map_segment

_OFFER_BYTES = 60 + TOKEN_BYTES


def empty_shared(shape: int | Sequence[int], *, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Return a contiguous CPU tensor in memory that all ranks of ``group`` map; its values are arbitrary.

    `all_reduce` of it, or of a contiguous part of it that all ranks choose alike, copies nothing: each rank reads its
    slice of all ranks' tensors and writes the result into all of them. In every other respect it is a tensor like
    others, and lives as long as anybody refers to it.

    Where the memory cannot be had (another backend, a full container), it is an ordinary tensor on all ranks.

    Collective: every rank of ``group``, with the same shape and dtype. Blocks until all have come.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(group, ShmProcessGroup) or math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    made: list[Tensor] = []
    calls = group.calls
    work = calls.submit("empty_shared", lambda call: made.append(_allocate(calls, call, sizes, dtype)), made)
    work.wait()
    return made[0]


def _allocate(calls: OpRunner, call: NativeCall, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make, offer, map and agree. Collective: every rank."""
    member = calls.member
    share_bytes = -(-math.prod(sizes) * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
    segment: Segment | None = None
    data = torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
    if member.rank == 0:
        try:
            segment, offer = make_segment(share_bytes * member.size)
            data = torch.frombuffer(bytearray(offer.pack()), dtype=torch.uint8)
        except NoSharedMemory:
            pass  # what was offered stays empty
    first = [data] + [None] * (member.size - 1)
    sends = [data if member.rank == 0 and rank != 0 else None for rank in range(member.size)]
    calls.exchange_now(
        call, communicator.ALLOCATE, sends, first if member.rank else [None] * member.size, root=0, same=True
    )
    if member.rank != 0 and data.any():
        try:
            segment = map_segment(Offer.unpack(data.numpy().tobytes()))
        except NoSharedMemory:
            segment = None
    mapped = torch.tensor([segment is not None], dtype=torch.uint8)
    everybody = [torch.empty_like(mapped) for _ in range(member.size)]
    calls.exchange_now(call, communicator.ALLOCATE, [mapped] * member.size, everybody, same=True)
    if segment is None or not all(bool(flag) for flag in everybody):
        if segment is not None:
            segment.close_file()
        return torch.empty(sizes, dtype=dtype)
    segment.close_file()
    calls.buckets.add(segment.memory, segment.address, share_bytes)
    flat = torch.frombuffer(segment.memory, dtype=dtype, count=math.prod(sizes), offset=member.rank * share_bytes)
    return flat.view(sizes)
