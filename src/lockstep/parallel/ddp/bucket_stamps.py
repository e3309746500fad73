"""When each bucket of a step was ready, sent and reduced, for whoever records the run.

The host's clock, or on CUDA events on the streams that the work runs on, which are read later: nothing waits for them.
How long the step waited for communication is stamped in each step, single buckets only in steps that are looked at
closely.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.futures import Future

from lockstep import progress

Mark = float | torch.cuda.Event


@dataclass
class Stamp:
    """A bucket's moments: when its last gradient was there, when it left, and when it was reduced."""

    position: int
    size_bytes: int
    ready: Mark
    sent: Mark | None = None
    done: Mark | None = None


@dataclass
class StepStamps:
    """The moments of one step.

    Attributes:
        buckets: In the order in which they left.
        waited: From when this rank's own work was done, until all buckets were reduced.
        exposed_s: What of that was waiting; None on CUDA, where it is all.
    """

    buckets: list[Stamp] = field(default_factory=list)
    waited: tuple[Mark, Mark] | None = None
    exposed_s: float | None = None


class BucketStamps:
    """Takes the moments of each step.

    Args:
        device: Where the model is.

    Attributes:
        closely: Whether single buckets are stamped in the coming step.
        last: The step that ended last; None once it was taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = StepStamps()
        self._wait_began: Mark | None = None
        self._waited_before_s = 0.0
        self.closely = False
        self.last: StepStamps | None = None

    def ready(self, position: int, size_bytes: int) -> None:
        """Take notice that all gradients of a bucket are there, and it is about to leave."""
        if position == 0:  # an exception may have cut short the step before
            self._now, self._wait_began = StepStamps(), None
        if self.closely:
            self._now.buckets.append(Stamp(position, size_bytes, self._mark()))

    def sending(self) -> None:
        """Take notice that the bucket is put together."""
        if self.closely:
            self._now.buckets[-1].sent = self._mark()

    def sent(self, future: Future[Any]) -> None:
        """Take notice that the bucket has left; ``future`` is done when it is reduced."""
        if not self.closely:
            return
        stamp = self._now.buckets[-1]
        if self._device.type != "cuda" and future.done():
            self._set_done(stamp)
        else:
            future.add_done_callback(lambda _: self._set_done(stamp))

    def _set_done(self, stamp: Stamp) -> None:
        stamp.done = self._mark()  # on CUDA the current stream is one that waits for the reduction

    def begin_wait(self) -> None:
        """Take notice that this rank's own work is done, unless it was before."""
        if self._wait_began is None:
            self._wait_began, self._waited_before_s = self._mark(), progress.now.waited_s

    def end_wait(self, exposed_s: float) -> None:
        """Take notice that all buckets are reduced, for which the host waited so long: the step is over."""
        if self._wait_began is not None:
            self._now.waited = self._wait_began, self._mark()
            progress.now.waited_s = self._waited_before_s  # what was waited since is said here
        self._now.exposed_s = None if self._device.type == "cuda" else exposed_s
        self.last, self._now, self._wait_began = self._now, StepStamps(), None

    def take(self) -> StepStamps | None:
        """Return the step that ended last, once."""
        last, self.last = self.last, None
        return last

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
