"""How a bucket is reduced: by one all-reduce, possibly in a narrower dtype, or by a communication hook."""

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lockstep.base.accelerator import upload, widest_dtype
from lockstep.comm import collectives
from lockstep.comm.collectives import Group, Started, all_reduce, all_reduce_work, empty_buffer, started
from lockstep.comm.network import wait_for_call
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.buckets import Bucket, BucketSet
from lockstep.parallel.flat import cut_views

CommHook = Callable[[Any, Any], Future[Any]]
# The reduction of a bucket that is under way.
Pending = Future[Any] | Started


class BucketReduction(ABC):
    """Starts the reduction of buckets and receives the results."""

    # Whether payloads are summed over the ranks. Then gradients are divided before `start`, and the tail of a finished
    # bucket holds the counts of all ranks. If not, the hook divides, and `count_users` gets the counts.
    sums_payloads = True

    # Whether every rank has all of the reduced gradients afterwards, and not only a part.
    leaves_whole = True

    # Whether `start` itself copies the gradients into a bucket, see `DenseBucket.pieces`.
    takes_pieces = False

    # Whether `finish` may be called as soon as a future is done, which happens at different times on the ranks.
    finishes_alone = True

    @abstractmethod
    def start(self, bucket: Bucket, *, alone: bool) -> Pending:
        """Start to reduce ``bucket`` over all ranks. Collective: every rank, in bucket order.

        Args:
            bucket: Holds this rank's gradients.
            alone: Whether this rank has nothing else to do: then this may block until the bucket is reduced. Does not
                block otherwise. It may differ between ranks.
        """

    @abstractmethod
    def finish(self, bucket: Bucket, future: Pending) -> None:
        """Block until ``bucket`` holds the reduced gradients."""

    def count_users(self, used: Sequence[int], message: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the contents of tails: by parameter the number of ranks that used it; the sum of weight messages.

        Collective: every rank, when all buckets of the step are finished. Blocks until complete (a device: its stream).

        Args:
            used: By parameter, whether it received a gradient on this rank.
            message: This rank's weight message.
            device: A device whose tensors this group can send.
        """
        raise NotImplementedError


_DONE: Future[Any] = Future()
_DONE.set_result(None)


@final
class AllReduceMean(BucketReduction):
    """The mean over ranks: gradients are divided first, so that fp16 does not overflow, then summed with the tail."""

    def __init__(self, group: Group) -> None:
        self._group, self.takes_pieces = group, collectives.takes_pieces(group)
        self._is_native = collectives.is_native(group)

    @override
    def start(self, bucket: Bucket, *, alone: bool) -> Pending:
        payload, pieces = bucket.payload, bucket.take_pieces() if self.takes_pieces else None
        if not (alone and payload.is_cpu and self._is_native):
            return started(all_reduce_work(payload, group=self._group, pieces=pieces), payload, self._group)
        # A blocking call runs in this thread, which has nothing else to do: that saves two thread switches.
        all_reduce(payload, group=self._group, pieces=pieces)
        return _DONE

    @override
    def finish(self, bucket: Bucket, future: Pending) -> None:
        wait_for_call(future)


# --- in a narrower dtype; other compression is in ../compression.py ---------------------------------------------------


def is_compressible(bucket: Bucket) -> bool:
    """Return whether gradients of this kind are compressed."""
    return not bucket.spec.sparse and bucket.spec.dtype in (torch.float32, torch.float64)


@final
class CastAllReduce(BucketReduction):
    """The mean over ranks by an all-reduce in ``dtype``, for backends that do this best; see `is_compressible`.

    The tail is part of the same message. Its counts of ranks are exact as far as ``dtype`` can count (256 ranks in
    bfloat16) and never zero beyond that. A sum of weights needs its own collective, as in a model with such parameters.
    """

    def __init__(self, bucket_set: BucketSet, group: Group, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._buffers: weakref.WeakKeyDictionary[Bucket, Tensor] = weakref.WeakKeyDictionary()
        bucket_set.on_rebuilt.append(self._allocate)

    def _allocate(self, buckets: Sequence[Bucket]) -> None:
        """Allocate shared buffers for buckets that all ranks create now. Collective: every rank."""
        for bucket in filter(is_compressible, buckets):
            size, device = bucket.payload.numel(), bucket.payload.device
            self._buffers[bucket] = empty_buffer(size, dtype=self._dtype, device=device, group=self._group)

    @override
    @torch.no_grad()
    def start(self, bucket: Bucket, *, alone: bool) -> Pending:
        if not is_compressible(bucket):
            return started(all_reduce_work(bucket.payload, group=self._group), bucket.payload, self._group)
        # Not the bucket's own memory: the parameters' gradients are views of it, in their own dtype.
        if bucket not in self._buffers:  # a bucket of the first step, or one that this rank created alone
            self._buffers[bucket] = torch.empty_like(bucket.payload, dtype=self._dtype)
        bucket.sent_dtype = self._dtype  # too narrow for a sum of weights, which needs its own collective
        sent = self._buffers[bucket].copy_(bucket.payload)
        return started(all_reduce_work(sent, group=self._group), sent, self._group)

    @override
    @torch.no_grad()
    def finish(self, bucket: Bucket, future: Pending) -> None:
        wait_for_call(future)
        if is_compressible(bucket):
            bucket.payload.copy_(self._buffers[bucket])


# --- communication hooks ----------------------------------------------------------------------------------------------


class GradBucket:
    """One bucket of gradients, as handed to a hook registered with ``register_comm_hook``.

    Source: the interface is that of ``torch.distributed.GradBucket``, so that torch's stock hooks work unchanged.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._replacement: Tensor | None = None

    def index(self) -> int:
        """Return the position of the bucket in the order of launches, from 0."""
        return self._bucket.position

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._bucket.is_last

    def buffer(self) -> Tensor:
        """Return the gradients of this rank, not yet divided by anything: 1-D, or the sparse gradient."""
        # A compressing wrapper sets its own buffer before it calls the inner hook.
        return self._bucket.gradients if self._replacement is None else self._replacement

    def set_buffer(self, buffer: Tensor) -> None:
        """Make :meth:`buffer` return ``buffer`` from now on; it may have another dtype (compressed)."""
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


@final
class CommHookReduction(BucketReduction):
    """A communication hook: it reduces and divides the gradients itself; the counts have their own collective."""

    sums_payloads = False
    finishes_alone = False  # the counts follow when all buckets are finished

    def __init__(self, group: Group, hook: CommHook, state: object) -> None:
        self._group = group
        self._hook = hook
        self._state = state
        self._last_sent: list[float] = []
        self._on_device = torch.empty(0)

    @override
    def start(self, bucket: Bucket, *, alone: bool) -> Pending:
        future = self._hook(self._state, GradBucket(bucket))
        if not isinstance(future, torch.Future):
            raise ConfigurationError(
                f"A communication hook: the callback must return a torch.futures.Future object, but got {type(future)}."
                "\nIf the result is ready, create a torch.futures.Future() and call set_result()."
            )
        return future

    @override
    def finish(self, bucket: Bucket, future: Pending) -> None:
        result = wait_for_call(future)  # torch's hooks return a tensor, others the list of one from all_reduce's future
        bucket.replace_gradients(result[0] if isinstance(result, list | tuple) else result)

    @override
    def count_users(self, used: Sequence[int], message: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
        # Not earlier: hooks start their own collectives when others finish, at times that differ between ranks.
        counts = [*used, *message]
        if counts != self._last_sent:  # the same in most steps
            self._last_sent, self._on_device = counts, upload(counts, widest_dtype(device), device)
        sums = self._on_device.clone()
        all_reduce(sums, group=self._group)
        return sums[: len(used)], sums[len(used) :]


def check_comm_hook(hook: Any, compression: str | None) -> None:
    """Refuse an invalid hook, with torch's error types and texts.

    Raises:
        ConfigurationError: Compression is set, but with a hook the hook decides about that.
        TypeError: It is not callable.
        ValueError: Its annotations say that it expects or returns something else.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if compression is not None:
        raise ConfigurationError(
            f"A communication hook sends the gradients itself, but compression={compression!r} was given.\n"
            "Leave one of the two out."
        )
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    allowed = (inspect.Parameter.empty, collectives.GradBucketType, "dist.GradBucket")
    if bucket is not None and bucket.annotation not in allowed:
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]) and not isinstance(returned, str):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
