"""The recorder of a rank: evaluates steps in a thread of its own, when the device has completed them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from lockstep.accelerator import start_thread, synchronize
from lockstep.telemetry.aggregator import RankMetrics
from lockstep.telemetry.record import Downsampler, Event, EventName, Line, LineWriter, StepLine, Timeline, guarded
from lockstep.telemetry.step_times import Mark, StepMarks, seconds_between

PERIOD_S = 1.0
# Until the first beat, as a run may be short.
_FIRST_S = 0.3
_JOIN_S = 8.0
# So many steps are evaluated at a time; in the pause, the training thread gets the interpreter lock.
_PIECE, _PIECE_PAUSE_S = 32, 0.001
# With so many steps in the queue, there are no pauses, so that the queue does not grow without limit.
_BEHIND = 50_000
# While the disk or the store hangs, so many are kept; then the oldest are dropped.
_MOST_WAITING = 100_000
# The first step with a timeline, and the number of such steps in a row.
_TIMELINE_FIRST, _TIMELINE_STEPS = 4, 4


def has_timeline(step: int) -> bool:
    """Return whether a step has a timeline: four of 64 steps, fewer from step 4096 on; the same on every rank."""
    # The report draws the timelines of all ranks together, so all must record the same steps.
    period = max(64, 1 << (step.bit_length() - 6)) if step >= 4096 else 64
    return (step - _TIMELINE_FIRST) % period < _TIMELINE_STEPS


class StepRecorder:
    """Writes the steps and events of this rank to its file, and adds them to the metrics of the run.

    ``fit`` and ``monitor`` give it a `StepMarks` for each step.

    [Note: in another thread]
    The training thread only appends to a queue. Another thread calls `drain` about once a second. It checks, without
    waiting, whether the device has completed a step, and evaluates a few steps at a time, as the training thread cannot
    run Python meanwhile. It also writes the file. At the end of the run it is abandoned if the store or the disk hangs.

    Args:
        writer: Writes the file of this rank; None if the run is not recorded.
        metrics: Also gets steps and events.
        sample: Returns the figures of the machine; called every other second.
        device: The device whose events it reads, if there is one.
        steps_per_epoch: None for a stream.
    """

    def __init__(
        self,
        writer: LineWriter | None,
        metrics: RankMetrics | None = None,
        *,
        sample: Callable[[], Line],
        device: torch.device | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self._writer, self._metrics, self._steps_per_epoch = writer, metrics, steps_per_epoch
        self._queue: deque[StepMarks | Event] = deque(maxlen=_MOST_WAITING)
        self._downsampler = Downsampler()
        self._last: StepMarks | None = None
        self._last_begin: tuple[Mark, float] | None = None
        self._sample, self._device, self._num_beats = sample, device, 0
        self._then: Callable[..., None] = lambda **_: None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, then: Callable[..., None] | None = None, period_s: float = PERIOD_S) -> None:
        """Start the recording thread.

        Args:
            then: Called after each round of recording; with ``is_last=True`` at the end.
            period_s: Seconds between two rounds.
        """
        self._then = then or self._then
        self._thread = start_thread(lambda: self._run(period_s), name="lockstep-recorder", device=self._device)

    def _run(self, period_s: float) -> None:
        wait_s = min(_FIRST_S, period_s)
        is_well = True
        while is_well and not self._over.wait(wait_s):
            wait_s = period_s
            is_well = guarded(self._beat)
        if is_well:
            guarded(self._end)
        if self._writer is not None:
            self._writer.close()

    def _beat(self) -> None:
        self.drain()
        if self._num_beats % 2 == 0:
            self._take_sample()
        self._num_beats += 1
        self._then()
        if self._writer is not None:
            self._writer.flush()

    def _end(self) -> None:
        self.drain(at_once=True)
        self._take_sample()
        if self._writer is not None and (rest := self._downsampler.rest()) is not None:
            self._writer.add(rest.to_line())
        self._then(is_last=True)

    def _take_sample(self) -> None:
        try:
            line = self._sample()
        except Exception:  # the figures of the machine are not available; errors below are reported by the thread
            return
        if self._metrics is not None:
            self._metrics.machine(line)
        if self._writer is not None:
            self._writer.add(line)

    def add(self, step: StepMarks) -> None:
        """Add a step, which the device may not have completed. Does not block."""
        self._last = step
        self._queue.append(step)

    def event(
        self,
        event: EventName,
        text: str,
        *,
        step: int,
        time_s: float | None = None,
        seconds: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Add an event. Does not block.

        Args:
            event: A name in `record.EVENTS`.
            text: What happened, in words.
            step: Number of steps done.
            time_s: When it began, in Unix time; now if None.
            seconds: The pause of training, if there was one.
            metrics: The results of an evaluation.
        """
        began_s = time.time() if time_s is None else time_s
        self._queue.append(Event(event=event, step=step, time=began_s, seconds=seconds, text=text, metrics=metrics))

    def drain(self, *, at_once: bool = False) -> None:
        """Record the steps that the device has completed, and the events between them. Does not wait for the device.

        Args:
            at_once: Record all events, without pauses, as the run ends. Steps that the device has not completed are
                dropped, as an error may have stopped the device.
        """
        count = 0
        while self._queue:
            item = self._queue[0]
            if not isinstance(item, StepMarks):
                self._record_event(item)
            elif all(mark.query() for mark in item.device_marks):
                self._record_step(item)
            elif not at_once:
                return  # the device has not completed later steps, either
            self._queue.popleft()
            count += 1
            if not at_once and count % _PIECE == 0 and len(self._queue) < _BEHIND:
                time.sleep(_PIECE_PAUSE_S)

    def finish(self, *, waits: bool) -> None:
        """Record all remaining steps and events, and close the file. Blocks some seconds at most for that.

        Args:
            waits: Whether to block until the device has completed the last step; not after an error.
        """
        if waits and self._last is not None:
            for mark in self._last.device_marks:
                synchronize(mark)
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._over.set()
        self._thread.join(_JOIN_S)

    def _record_step(self, step: StepMarks) -> None:
        took = step.times()
        if self._metrics is not None:
            self._metrics.add_step(step, took)
        if self._writer is not None:
            began_s = self._begin_of(step, took.total_s)
            line = self._downsampler.add(StepLine.of(step, took, began_s, self._steps_per_epoch))
            if line is not None:
                self._writer.add(line.to_line())
            if step.has_timeline:
                self._writer.add(Timeline.of(step, began_s).to_line())

    def _record_event(self, event: Event) -> None:
        if self._metrics is not None:
            self._metrics.add_event(event)
        if self._writer is not None:
            self._writer.add(event.to_line())
        if event.seconds is not None:
            self._last_begin = None  # the device is idle: the next step begins when the host launches it

    def _begin_of(self, step: StepMarks, total_s: float) -> float:
        """Return when a step began, in Unix time of this host; called for each step in order.

        On CUDA, a step begins when the device reaches it, possibly long after the host launched it. The device only
        measures time between events, so the time is that of the step before plus the difference; not earlier than the
        launch by the host, and not later than when the host found the step completed.
        """
        if isinstance(step.begin, float):
            return step.wall_s + (step.begin - step.began_at)
        began_s = step.wall_s
        if self._last_begin is not None:
            before, before_s = self._last_begin
            began_s = max(began_s, min(before_s + seconds_between(before, step.begin), time.time() - total_s))
        self._last_begin = step.begin, began_s
        return began_s
