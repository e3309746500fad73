"""The buckets that have left in one step, in the order of the row, until their gradients are the mean.

[Note: reduced]
A bucket is *reduced* when ``param.grad`` of its parameters is what the step leaves there. ``on_reduced`` is called
then: once per step for each bucket that left, in the order in which they left, which is the same on every rank. That is
when the step closes; with ``eager`` also during backward, when a later bucket leaves and an earlier one is done. With
weights or a communication hook it is never during backward: only the end of the step shows what all ranks gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.futures import Future

from lockstep import progress
from lockstep.comm.collectives import Group
from lockstep.errors import CollectiveError, ConfigurationError
from lockstep.parallel.ddp.ballot import Ballot
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.bucket_row import BucketRow
from lockstep.parallel.ddp.bucket_stamps import BucketStamps
from lockstep.parallel.ddp.capture import refuse_absent
from lockstep.parallel.ddp.step_times import Moment, StepTimes
from lockstep.parallel.ddp.transport import MeanTransport, Transport
from lockstep.parallel.ddp.weights import Weights, find_carrier
from lockstep.telemetry import ranges

Departure = tuple[Bucket, "Future[Any]"]


class Departures:
    """Lets the buckets of ``row`` leave one after the other, and brings them home.

    Args:
        row: The buckets.
        group: The ranks that take part.
        weights: What the ranks weigh.
        times: What wants to know when communication begins.
        skip_unused: Do not reduce buckets without any gradient; only right if all ranks agree on which.

    Attributes:
        transport: How buckets travel. May be replaced between steps, on all ranks alike.
        divisor: What gradients are divided by before they are summed; the number of ranks.
        on_reduced: What to call with each bucket when it is reduced, see [Note: reduced].
        on_leaving: What to call with each bucket before it leaves, while it holds this rank's gradients only.
        eager: Whether to call it during backward where that is possible.
        num_left: How many buckets have left in this step, those that were skipped included.
        exposed_wait_s: How long the last step waited for communication after its own work was done, on the host.
        stamps: What wants to know when each bucket is ready and reduced, if anybody does.
    """

    def __init__(self, row: BucketRow, group: Group, weights: Weights, times: StepTimes, *, skip_unused: bool) -> None:
        self.transport: Transport = MeanTransport(group)
        self.divisor = float(group.size())
        self.on_reduced: list[Callable[[Bucket], None]] = []
        self.on_leaving: list[Callable[[Bucket], None]] = []
        self.eager = False
        self.exposed_wait_s = 0.0
        self.stamps: BucketStamps | None = None
        self._row = row
        self._weights, self._times = weights, times
        self._skip_unused = skip_unused
        self._num_told = 0
        self._abandoned: list[Future[Any]] = []
        self._lane: torch.cuda.Stream | None = None
        self._under_way: list[Departure] = []
        self.reset()

    def reset(self) -> None:
        """Forget the buckets that have left: the step is over, or an exception cut it short."""
        self._abandoned += [future for _, future in self._under_way[self._num_told :]]
        self.num_left = 0
        self._under_way = []
        self._num_told = 0

    def wait_for_abandoned(self) -> None:
        """Block until nobody writes any more into buckets that left in a step which was cut short."""
        while self._abandoned:
            with suppress(RuntimeError):
                self._abandoned.pop().wait()

    @property
    def num_under_way(self) -> int:
        """How many buckets are reduced in this step; those that were skipped are not."""
        return len(self._under_way)

    @property
    def have_all_left(self) -> bool:
        """Whether no bucket of this step is to leave any more."""
        return self.num_left >= len(self._row.buckets)

    def launch_rest(self, used: bytearray) -> None:
        """Let all leave that have not, since backward is over; see `launch`. Blocks until complete at most."""
        self.exposed_wait_s = 0.0
        while not self.have_all_left:
            self.launch(used, alone=self.num_left == len(self._row.buckets) - 1)

    def launch(self, used: bytearray, *, alone: bool = False) -> None:
        """Gather the next bucket's gradients and start its reduction. Does not block. Collective: every rank.

        Args:
            used: By parameter, whether it received a gradient since the last synchronised step.
            alone: Whether nothing is left to do meanwhile; then it may block.
        """
        bucket = self._row.buckets[self.num_left]
        mine = [used[index] for index in bucket.spec.parameters]
        if self.stamps is not None:
            self.stamps.ready(self.num_left, bucket.spec.size_bytes)
        divisor = self.divisor if self.transport.takes_divided else None
        share = self._weights.share(bucket.spec.parameters, used, divisor)
        if not self._skip_unused or any(mine):
            bucket.gather(mine, share)
            refuse_absent(bucket)
            for look in self.on_leaving:
                look(bucket)
            self._times.mark(Moment.COMMUNICATION)
            self._under_way.append((bucket, self._start(bucket, self.num_left, alone=alone)))
        self.num_left += 1
        if self.eager:
            self._tell_early()

    def _start(self, bucket: Bucket, position: int, *, alone: bool = False) -> Future[Any]:
        if ranges.now is None:
            return self._start_stamped(bucket, position, alone=alone)
        with ranges.now.open(f"exchange/bucket {position}"):
            return self._start_stamped(bucket, position, alone=alone)

    def _start_stamped(self, bucket: Bucket, position: int, *, alone: bool) -> Future[Any]:
        if self.stamps is None:
            return self._send(bucket, position, alone=alone)
        self.stamps.sending()
        if alone:
            self.stamps.begin_wait()
        future = self._send(bucket, position, alone=alone)
        self.stamps.sent(future)
        return future

    def _send(self, bucket: Bucket, position: int, *, alone: bool) -> Future[Any]:
        if not alone:
            return self.transport.start(bucket, position, is_last=position == len(self._row.buckets) - 1)
        started_s = time.perf_counter()
        with self._naming(bucket, position):
            future = self.transport.start_alone(bucket, position)
        self.exposed_wait_s += time.perf_counter() - started_s
        return future

    @property
    def _may_tell_early(self) -> bool:
        return bool(self.on_reduced) and self._weights.window is None and self.transport.counts_in_tails

    def _tell_early(self) -> None:
        if not self._may_tell_early:
            return
        with self._beside_backward():
            while self._num_told < len(self._under_way):
                bucket, future = self._under_way[self._num_told]
                if not future.done() or (self._lane is not None and (bucket.absent or bucket.spec.sparse)):
                    return
                self._finish_next()

    def _beside_backward(self) -> AbstractContextManager[object]:
        """Return a context in which the device does not keep the rest of backward waiting."""
        if self._row.device.type != "cuda":
            return nullcontext()
        if self._lane is None:
            self._lane = torch.cuda.Stream(self._row.device)
        return torch.cuda.stream(self._lane)

    def _finish_next(self) -> None:
        self._finish(self._num_told, self._under_way)
        self._under_way[self._num_told][0].settle(None)
        self._tell_next()

    def _tell_next(self) -> None:
        bucket = self._under_way[self._num_told][0]
        self._num_told += 1
        for callback in self.on_reduced:
            callback(bucket)
        if self.on_reduced:
            bucket.seal()  # what they did to gradients was no gradient that came late

    def complete(self, used: bytearray, ballot: Ballot) -> None:
        """Block until all buckets that left are reduced.

        Collective: every rank, with buckets that left in the same order.

        Args:
            used: By parameter, whether it received a gradient on this rank.
            ballot: What this rank said of its weight when the buckets left.

        Raises:
            CollectiveError: Another rank ended or did not take part.
            ConfigurationError: On every rank: some ranks gave weights and others did not; names the latter.
        """
        if self.stamps is not None:
            self.stamps.begin_wait()
        if self._lane is not None:
            torch.cuda.current_stream(self._row.device).wait_stream(self._lane)
        while self._may_tell_early and self._num_told < len(self._under_way):  # while the next ones still travel
            self._finish_next()
        num_users = self._bring_home(self._under_way, used, ballot)
        while self._num_told < len(self._under_way):
            self._under_way[self._num_told][0].settle(num_users)
            self._tell_next()
        if self.stamps is not None:
            self.stamps.end_wait(self.exposed_wait_s)

    def complete_scratch(self, buckets: Sequence[Bucket]) -> None:
        """Take part in a step of the other ranks with ``buckets``, which nobody is told of; see `complete`."""
        left = [(bucket, self._send(bucket, position, alone=False)) for position, bucket in enumerate(buckets)]
        self._bring_home(left, bytearray(len(self._row.parameters)), Ballot())

    def _bring_home(self, left: Sequence[Departure], used: bytearray, ballot: Ballot) -> list[int] | None:
        """Return how many ranks used each parameter, unless the tails say it, when all ``left`` hold the mean."""
        for position in range(self._num_told, len(left)):
            self._finish(position, left)
        weights = self._weights
        counts = self.transport.count(used, weights.encode(ballot), weights.device)
        must_know = ballot != Ballot(is_missing=True)
        factor: float | None = None
        if counts is not None:
            factor = weights.conclude(counts.ballots, is_urgent=must_know)
        elif (carrier := find_carrier(left, self.transport.ballot_of)) is not None:
            factor = weights.conclude(*carrier, is_urgent=must_know)
        if factor is None:
            factor = weights.conclude_apart(ballot) if left else 1.0
        if factor != 1.0:
            for bucket, _ in left:
                bucket.scale(factor)
        return None if counts is None else counts.num_users

    def _finish(self, position: int, left: Sequence[Departure]) -> None:
        bucket, future = left[position]
        started_s = time.perf_counter()
        with self._naming(bucket, position):
            self.transport.finish(bucket, future)
        self.exposed_wait_s += time.perf_counter() - started_s

    @contextmanager
    def _naming(self, bucket: Bucket, position: int) -> Iterator[None]:
        """Name the bucket to the watchdog, and in the error of a reduction that fails inside."""
        progress.now.bucket = position, bucket.names
        waits = None if ranges.now is None else ranges.now.open(f"exchange/bucket {position} wait")
        try:
            yield
        except ConfigurationError:  # not the reduction's, but of who called for it
            raise
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self._weights.rank}: the gradient reduction of bucket {position} "
                f"({bucket.names[0]} ... {bucket.names[-1]}) failed: {error}\n"
                "Another rank probably ended or ran no backward; look at the first error of the job."
            ) from error
        finally:
            progress.now.bucket = None
            if waits is not None:
                waits.close()
