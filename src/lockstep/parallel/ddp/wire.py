"""Gradients that travel in fewer bits than they have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.buffers import empty_buffer
from lockstep.comm.collectives import Group, all_reduce_async
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.bucket_row import BucketRow
from lockstep.parallel.ddp.transport import Transport

WireName = Literal["bf16", "fp16"]
WireDtype = torch.dtype | WireName | None
_NAMES: dict[WireName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE = (torch.float32, torch.float64)


def wire_dtype_of(value: WireDtype) -> torch.dtype | None:
    """Return the dtype that gradients travel in; None: their own.

    Raises:
        ConfigurationError: It is none of those that can be.
    """
    for name, dtype in _NAMES.items():
        if value in (name, dtype):
            return dtype
    if value is None:
        return None
    raise ConfigurationError(
        f"wire_dtype={value!r} is not allowed.\n"
        "Give torch.bfloat16 or torch.float16 ('bf16', 'fp16'), or None to send gradients as they are."
    )


def width_of(dtype: torch.dtype | None, buckets: Sequence[Bucket]) -> float:
    """Return how many bytes travel for each byte of the gradients in ``buckets`` if they are rounded to ``dtype``."""
    total = sum(bucket.spec.size_bytes for bucket in buckets)
    if dtype is None or not total:
        return 1.0
    return (
        sum(
            bucket.spec.size_bytes * (dtype.itemsize / bucket.spec.dtype.itemsize if _narrows(bucket) else 1.0)
            for bucket in buckets
        )
        / total
    )


def _narrows(bucket: Bucket) -> bool:
    return not bucket.spec.sparse and bucket.spec.dtype in _WIDE


@final
class NarrowTransport(Transport):
    """The mean over ranks, rounded to ``dtype`` before it is summed; for buckets of wider gradients only.

    The tail travels in the same message. It counts ranks, exactly as far as ``dtype`` can count (256 ranks in bfloat16)
    and never to zero beyond; a sum of weights follows apart, as for a model whose parameters are that narrow.
    """

    takes_divided = True
    counts_in_tails = True

    def __init__(self, row: BucketRow, group: Group, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._buffers: weakref.WeakKeyDictionary[Bucket, Tensor] = weakref.WeakKeyDictionary()
        row.on_rebuilt.append(self._allocate)

    def _allocate(self, buckets: Sequence[Bucket]) -> None:
        """Give buckets that all ranks make now what they travel in, where all can see it. Collective: every rank."""
        for bucket in filter(_narrows, buckets):
            payload = bucket.payload
            self._buffers[bucket] = empty_buffer(
                payload.numel(), dtype=self._dtype, device=payload.device, group=self._group
            )

    @override
    def start(self, bucket: Bucket, position: int, *, is_last: bool) -> Future[Any]:
        wire = self._buffer_for(bucket)
        if wire is None:
            return all_reduce_async(bucket.payload, group=self._group)
        with torch.no_grad():
            wire.copy_(bucket.payload)
        return all_reduce_async(wire, group=self._group)

    @override
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        future.wait()
        wire = self._buffer_for(bucket)
        if wire is not None:
            with torch.no_grad():
                bucket.payload.copy_(wire)

    @override
    def count(self, used: Sequence[int], ballot: Sequence[float], device: torch.device) -> None:
        return None

    @override
    def ballot_of(self, bucket: Bucket) -> Tensor | None:
        wire, ballot = self._buffer_for(bucket), bucket.ballot
        return ballot if wire is None or ballot is None else wire[wire.numel() - ballot.numel() :]

    def _buffer_for(self, bucket: Bucket) -> Tensor | None:
        """Return what ``bucket`` travels in; None: as it is."""
        if not _narrows(bucket):
            return None
        buffer = self._buffers.get(bucket)
        if buffer is None:  # of the first step, or made by this rank alone
            buffer = torch.empty_like(bucket.payload, dtype=self._dtype)
            self._buffers[bucket] = buffer
        return buffer
