"""How a bucket is reduced: by one all-reduce, by a compressed one, or by a communication hook."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.collectives import (
    BuiltinCommHookType,
    GradBucketType,
    Group,
    all_reduce,
    all_reduce_async,
    empty_buffer,
    is_native,
    overlapped_optimizer,
    stock_comm_hooks,
)
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.buckets import Bucket, Buckets, cut_views

__all__ = ["builtin_comm_hook", "check_comm_hook", "overlapped_optimizer"]


# What a communication hook sees of a bucket: the methods of torch's ``GradBucket``.


class GradBucket:
    """One bucket of gradients, as handed to a hook registered with ``register_comm_hook``.

    Source: the interface is that of ``torch.distributed.GradBucket``, so that torch's stock hooks work unchanged.
    """

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._replacement: Tensor | None = None

    def index(self) -> int:
        """Return the position of the bucket in the order of launches, from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the gradients of this rank, not yet divided by anything: 1-D, or the sparse gradient."""
        return self._bucket.gradients if self._replacement is None else self._replacement

    def set_buffer(self, buffer: Tensor) -> None:
        """Let :meth:`buffer` return ``buffer`` from now on, which may be of another dtype (compressed)."""
        self._replacement = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views into :meth:`buffer`, in the order of :meth:`parameters`."""
        if self._replacement is None:
            return self._bucket.gradient_views()
        if self._bucket.spec.sparse:
            return [self._replacement]
        return cut_views(self._replacement, self._bucket.parameters)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients the bucket holds."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the step."""
        return self._is_last


# How a bucket travels: one all-reduce, or what a communication hook makes of it.

CommHook = Callable[[Any, Any], Future[Any]]


class Counts(NamedTuple):
    """On how many ranks each parameter was used, and the sum of the ranks' ballots."""

    num_users: list[int]
    ballots: Tensor


class BucketReduction(ABC):
    """Starts the reduction of buckets and takes the results in."""

    takes_divided: bool
    """Whether gradients are to be divided before `start`."""

    counts_in_tails: bool
    """Whether a finished bucket's tail holds the sum over the ranks; `count` then returns None."""

    leaves_whole = True
    """Whether every rank then has all of the reduced gradients, and not only a part."""

    @abstractmethod
    def start(self, bucket: Bucket, position: int, *, is_last: bool) -> Future[Any]:
        """Start to reduce ``bucket`` over all ranks; does not block. Collective: every rank, in bucket order."""

    def start_alone(self, bucket: Bucket, position: int) -> Future[Any]:
        """Do as `start` for the last bucket of a step, when this rank has nothing else to do: may block until reduced.

        Collective: every rank, in bucket order. Others may call `start` meanwhile.
        """
        return self.start(bucket, position, is_last=True)

    @abstractmethod
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        """Block until ``bucket`` holds the reduced gradients."""

    @abstractmethod
    def count(self, used: Sequence[int], ballot: Sequence[float], device: torch.device) -> Counts | None:
        """Return what the buckets' tails would say; None where they do.

        Collective: every rank, when all buckets of the step are finished. Blocks until complete.

        Args:
            used: By parameter, whether it received a gradient on this rank.
            ballot: What this rank says of weights.
            device: Where tensors lie that this group can send.
        """

    def ballot_of(self, bucket: Bucket) -> Tensor | None:
        """Return the sum of the ranks' ballots of a finished ``bucket``, in the dtype that it travelled in."""
        return bucket.ballot


@final
class AllReduceMean(BucketReduction):
    """The mean over ranks: divided first, so that fp16 does not overflow, then summed together with the tail."""

    takes_divided = True
    counts_in_tails = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self._may_block = is_native(group)  # of others only the future is known to tell when they are done

    @override
    def start(self, bucket: Bucket, position: int, *, is_last: bool) -> Future[Any]:
        return all_reduce_async(bucket.payload, group=self._group)

    @override
    def start_alone(self, bucket: Bucket, position: int) -> Future[Any]:
        if not (bucket.payload.is_cpu and self._may_block):
            return self.start(bucket, position, is_last=True)  # a future that other streams can wait for
        all_reduce(bucket.payload, group=self._group)  # saves two hand-overs between threads
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    @override
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        future.wait()

    @override
    def count(self, used: Sequence[int], ballot: Sequence[float], device: torch.device) -> None:
        return None


@final
class CommHookReduction(BucketReduction):
    """A communication hook: it owns the gradients and divides them itself, and the counts travel on their own."""

    takes_divided = False
    counts_in_tails = False

    def __init__(self, group: Group, hook: CommHook, state: object) -> None:
        self._group = group
        self._hook = hook
        self._state = state
        self._said: list[float] = []
        self._on_device = torch.empty(0)

    @override
    def start(self, bucket: Bucket, position: int, *, is_last: bool) -> Future[Any]:
        future = self._hook(self._state, GradBucket(bucket, position, is_last=is_last))
        if not isinstance(future, torch._C.Future):
            raise ConfigurationError(
                f"A communication hook: the callback must return a torch.futures.Future object, but got {type(future)}."
                "\nFor a result that is there already, make a torch.futures.Future() and call its set_result."
            )
        return future

    @override
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        result = future.wait()
        bucket.gradients = result[0] if isinstance(result, list | tuple) else result

    @override
    def count(self, used: Sequence[int], ballot: Sequence[float], device: torch.device) -> Counts:
        # Not earlier: hooks start collectives of their own when others finish, at a time that differs between ranks.
        said = [*used, *ballot]
        if said != self._said:  # the same in most steps, and a copy to a GPU would block
            self._said, self._on_device = said, torch.tensor(said, dtype=torch.float64, device=device)
        sums = self._on_device.clone()
        all_reduce(sums, group=self._group)
        counts, ballots = sums[: len(used)], sums[len(used) :]
        return Counts([1] * len(used) if all(used) else [int(count) for count in counts.tolist()], ballots)


# Gradients that travel in fewer bits than they have.

WireName = Literal["bf16", "fp16"]
WireDtype = torch.dtype | WireName | None
_NAMES: dict[WireName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE = (torch.float32, torch.float64)


def compression_dtype(value: WireDtype) -> torch.dtype | None:
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
class CompressedAllReduce(BucketReduction):
    """The mean over ranks, rounded to ``dtype`` before it is summed; for buckets of wider gradients only.

    The tail travels in the same message. It counts ranks, exactly as far as ``dtype`` can count (256 ranks in bfloat16)
    and never to zero beyond; a sum of weights follows apart, as for a model whose parameters are that narrow.
    """

    takes_divided = True
    counts_in_tails = True

    def __init__(self, row: Buckets, group: Group, dtype: torch.dtype) -> None:
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


# Check communication hooks, and find the Python form of torch's built-in ones.


def check_comm_hook(hook: Any, wire_dtype: torch.dtype | None) -> None:
    """Refuse what cannot be a hook, with torch's error types and texts.

    Raises:
        ConfigurationError: Gradients are to be sent in ``wire_dtype``, which is the hook's to decide.
        TypeError: It is not callable.
        ValueError: Its annotations say that it expects or returns something else.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if wire_dtype is not None:
        raise ConfigurationError(
            f"A communication hook decides itself in what gradients travel, but wire_dtype={wire_dtype} was given.\n"
            "Leave one of the two out."
        )
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, GradBucketType, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]) and not isinstance(returned, str):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def builtin_comm_hook(kind: Any) -> CommHook:
    """Return the hook for torch's ``BuiltinCommHookType``; its state is the process group.

    Raises:
        ConfigurationError: It is neither ALLREDUCE nor FP16_COMPRESS.
    """
    stock = stock_comm_hooks()
    hooks: dict[Any, CommHook] = {
        BuiltinCommHookType.ALLREDUCE: stock.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: stock.fp16_compress_hook,
    }
    if kind in hooks:
        return hooks[kind]
    raise ConfigurationError(f"Unknown built-in communication hook: {kind!r}.\nUse ALLREDUCE or FP16_COMPRESS.")
