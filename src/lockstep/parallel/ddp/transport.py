"""How a bucket travels: one all-reduce, or what a communication hook makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.collectives import Group, all_reduce, all_reduce_async, is_native
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.grad_bucket import GradBucket

CommHook = Callable[[Any, Any], Future[Any]]


class Counts(NamedTuple):
    """On how many ranks each parameter was used, and the sum of the ranks' ballots."""

    num_users: list[int]
    ballots: Tensor


class Transport(ABC):
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
class MeanTransport(Transport):
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
class HookTransport(Transport):
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
