"""The events of a step, and the times of its buckets for the record of a run."""

import time
from enum import Enum
from typing import Any, Protocol

import torch

from lockstep.base import activity
from lockstep.base.accelerator import is_capturing, mark_on
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.telemetry.step_times import BucketMarks, Mark, Reduction


class Event(Enum):
    """The events that observers of a step get, in this order; events with a bucket occur once for each bucket."""

    BACKWARD = "backward"  # a backward that is synchronised has reached the model
    READY = "ready"  # bucket: all its gradients are there
    GATHERED = "gathered"  # bucket: this rank's gradients are in it, or in its ``pieces``; it is about to be launched
    LAUNCHED = "launched"  # bucket: its reduction is under way, ``bucket.future`` is done when the reduction is
    BACKWARD_END = "backward end"  # this rank's own work is done, except for the buckets still to be launched
    WAIT = "wait"  # bucket: the host begins to wait for it
    WAIT_END = "wait end"  # bucket: the wait is over (on CUDA: the stream will wait)
    REDUCED = "reduced"  # bucket: ``param.grad`` of its parameters has the final value of the step
    CLOSED = "closed"  # the step is over


class Observer(Protocol):
    """Gets the events of a step. Called under the reducer's lock, so it must start no backward."""

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle the event ``kind`` of ``bucket``."""


class BucketStamps:
    """Records the times of each step, for the run's record.

    The time that a step waited for communication is measured in every step, single buckets only in steps with a
    timeline.

    Args:
        device: The model's device.

    Attributes:
        closely: Whether single buckets are stamped in the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.closely = self._is_off = self._is_over = False
        self._now = Reduction()
        self._last: Reduction | None = None  # the last step that ended
        # The first wait after backward, and how long the host had waited before.
        self._own_work_end: tuple[Mark, float] | None = None

    def take(self) -> Reduction | None:
        """Return the last step that ended, once."""
        last, self._last = self._last, None
        return last

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer."""
        if kind is Event.BACKWARD:
            self._now = Reduction(exposed_s=0.0 if self._device.type == "cpu" else None)
            self._is_over, self._own_work_end = False, None
            self._is_off = is_capturing(self._device)  # nobody can ask for the time of a captured event
        elif self._is_off:
            return
        elif kind is Event.BACKWARD_END:
            self._is_over = True
        # Waits within backward are for buckets that finish early, which are already reduced.
        elif kind is Event.WAIT and self._is_over:
            self._wait_from_s = time.perf_counter()
            self._own_work_end = self._own_work_end or (mark_on(self._device), activity.now.waited_s)
        elif kind is Event.WAIT_END and self._is_over:
            # On a device the stream waits, not the host; `waited` measures the stream.
            if self._now.exposed_s is not None:
                self._now.exposed_s += time.perf_counter() - self._wait_from_s
        elif kind is Event.CLOSED:
            if self._own_work_end is not None:
                begin, activity.now.waited_s = self._own_work_end  # the waits since then are in `waited`
                self._now.waited = begin, mark_on(self._device)
            self._last = self._now
        elif self.closely and bucket is not None and kind is Event.READY:
            self._now.buckets.append(BucketMarks(bucket.position, bucket.spec.size_bytes, mark_on(self._device)))
        elif self.closely and kind is Event.GATHERED:
            self._now.buckets[-1].sent = mark_on(self._device)
        elif self.closely and bucket is not None and kind is Event.LAUNCHED:
            stamp, future = self._now.buckets[-1], bucket.future
            assert future is not None

            def set_done(_: Any) -> None:
                stamp.done = mark_on(self._device)  # the current stream waits for the reduction

            future.add_done_callback(set_done)  # at once if it is done
