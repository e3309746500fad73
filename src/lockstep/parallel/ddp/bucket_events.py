"""Observers of a reducer: when buckets were ready, launched and reduced, and what a step takes by phase."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import torch
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import activity
from lockstep.parallel.compile import is_capturing
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.ddp.reducer import Event
from lockstep.telemetry import ranges
from lockstep.telemetry.run_record import BucketTimes, Mark, Reduction, seconds_between
from lockstep.telemetry.stragglers import StepTimes, ends_window, is_looked_at, note_of, pace_of


def mark_on(device: torch.device) -> Mark:
    """Return a mark of now, or of when the current stream of ``device`` gets here: nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@final
class BucketStamps:
    """Takes the moments of each step, for whoever records the run.

    How long the step waited for communication is taken in each step, single buckets only in steps with a timeline.

    Args:
        device: Where the model is.

    Attributes:
        closely: Whether single buckets are stamped in the coming step.
        last: The step that ended last; None once it was taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.closely = False
        self.last: Reduction | None = None
        self._device = device
        self._own_work_end: Mark | None = None
        self._exposed_s = 0.0
        self._begin()

    def take(self) -> Reduction | None:
        """Return the step that ended last, once."""
        last, self.last = self.last, None
        return last

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer."""
        if kind is Event.BACKWARD:
            self._begin()  # also behind a backward that failed
        elif kind is Event.BACKWARD_END:
            self._is_over = True
        # Waits within backward are of buckets that are finished early, which are reduced already.
        elif kind is Event.WAIT and self._is_over:
            self._wait_from_s = time.perf_counter()
            if self._own_work_end is None:
                self._own_work_end, self._waited_before_s = mark_on(self._device), activity.now.waited_s
        elif kind is Event.WAIT_END and self._is_over:
            self._exposed_s += time.perf_counter() - self._wait_from_s
        elif kind is Event.CLOSED:
            step = self._now
            if self._own_work_end is not None:
                step.waited = self._own_work_end, mark_on(self._device)
                activity.now.waited_s = self._waited_before_s  # what was waited since is in `waited`
            # On CUDA the host does not wait, but the stream, which is what `waited` measures.
            step.exposed_s = None if self._device.type == "cuda" else self._exposed_s
            self.last = step
            self._begin()
        elif self.closely and bucket is not None:
            self._stamp(kind, bucket)

    def _begin(self) -> None:
        self._now, self._is_over = Reduction(), False
        self._own_work_end = None
        self._wait_from_s = self._exposed_s = self._waited_before_s = 0.0

    def _stamp(self, kind: Event, bucket: Bucket) -> None:
        if kind is Event.READY:
            self._now.buckets.append(BucketTimes(bucket.position, bucket.spec.size_bytes, mark_on(self._device)))
        elif kind is Event.GATHERED:
            self._now.buckets[-1].sent = mark_on(self._device)
        elif kind is Event.LAUNCHED:
            stamp, future = self._now.buckets[-1], bucket.future
            assert future is not None

            def set_done(_: Future[Any] | None = None) -> None:
                stamp.done = mark_on(self._device)  # on CUDA the current stream is one that waits for the reduction

            if self._device.type != "cuda" and future.done():
                set_done()
            else:
                future.add_done_callback(set_done)


@final
class BucketRanges:
    """Names buckets in the traces of torch.profiler and NVIDIA's tools, while somebody looks; see telemetry/ranges."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer."""
        if bucket is None:
            return
        if kind is Event.GATHERED:
            self._open.enter_context(ranges.around(f"exchange/bucket {bucket.position}"))
        elif kind is Event.WAIT:
            self._open.enter_context(ranges.around(f"exchange/bucket {bucket.position} wait"))
        elif kind in (Event.LAUNCHED, Event.WAIT_END):
            self._open.close()


@final
class PaceClock:
    """Measures what each step of this rank takes by phase, so that ranks can be compared; see telemetry/stragglers.py.

    A rank's own work of a step ends when backward is over and all its buckets are ready, which is before the last of
    them is launched. The loader has what lies between two steps, without the optimizer. Nothing is measured unless
    somebody asks, and then in some steps only.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = 0
        self._step: _Step | None = None  # the one that is measured, from the end of the one before
        self._steps: list[_Step] = []

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer."""
        step = self._step
        if kind is Event.CLOSED:
            self._close()
        elif step is None:
            return
        elif kind is Event.FORWARD:
            if not step.moments and self._publishes():
                step.note(self._device)
            elif len(step.moments) > 1:
                self._step = None  # its backward failed; with one moment this is another forward before a backward
        elif kind is Event.BACKWARD_END or (kind is Event.BACKWARD and len(step.moments) == 1):
            step.note(self._device)

    def on_optimizer(self, *, is_over: bool) -> None:
        """Take note that an optimizer of this process begins a step, or has ended it."""
        if self._step is not None and not self._step.moments:
            self._step.optimizer.append((is_over, mark_on(self._device)))

    def _close(self) -> None:
        if not self._publishes():
            return
        step, self._step = self._step, None
        if step is not None:
            step.note(self._device)
            if len(step.moments) == 4:  # fewer where a backward reached no output of ours, more where one failed
                self._steps.append(step)
        if ends_window(self._number):
            self._publish()
        self._number += 1
        if is_looked_at(self._number) and not is_capturing(self._device):
            self._step = _Step(mark_on(self._device))

    def _publishes(self) -> bool:
        """Return whether the launcher asks for this rank's pace, and this is the first wrapper in it that trains."""
        global _publisher
        if not activity.callbacks.wants_pace:
            return False
        # Hooks of optimizers are global, and stay: so once a process, and never where nobody asks.
        if _publisher is None:
            register_optimizer_step_pre_hook(lambda *_: _note_optimizer(is_over=False))
            register_optimizer_step_post_hook(lambda *_: _note_optimizer(is_over=True))
        if _publisher is None or _publisher() is None:
            _publisher = weakref.ref(self)
        return _publisher() is self

    def _publish(self) -> None:
        """Write the pace of the steps that were measured. Blocks on CUDA until the last of them is over."""
        steps, self._steps = self._steps, []
        if len(steps) < 2:
            return
        last = steps[-1].moments[-1]  # recorded last, so the others are over, too
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        activity.now.pace = note_of(self._number, pace_of([step.times() for step in steps]))


_publisher: weakref.ref[PaceClock] | None = None


def _note_optimizer(*, is_over: bool) -> None:
    clock = None if _publisher is None else _publisher()
    if clock is not None:
        clock.on_optimizer(is_over=is_over)


@dataclass
class _Step:
    """The moments of one step: the end of the one before; forward, backward, own work done, end; and optimizers."""

    before: Mark
    moments: list[Mark] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    optimizer: list[tuple[bool, Mark]] = field(default_factory=list)

    def note(self, device: torch.device) -> None:
        """Add a moment, and what this rank had waited in other collectives by then."""
        self.moments.append(mark_on(device))
        self.waited_s.append(activity.now.waited_s)

    def times(self) -> StepTimes:
        """Return what the step took, once all its moments have come."""
        forward, backward, ready, end = self.moments
        # A step that raised has a beginning without an end.
        spans = [(begin, end) for (over, begin), (ends, end) in pairwise(self.optimizer) if ends and not over]
        optimizer_s = sum(seconds_between(*span) for span in spans)
        in_forward_s, in_backward_s = (self.waited_s[i + 1] - self.waited_s[i] for i in range(2))
        return StepTimes(
            loader=seconds_between(self.before, forward) - optimizer_s,
            forward=seconds_between(forward, backward) - in_forward_s,
            backward=seconds_between(backward, ready) - in_backward_s,
            optimizer=optimizer_s,
            waits=seconds_between(ready, end) + in_forward_s + in_backward_s,
        )
