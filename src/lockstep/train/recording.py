"""Takes the steps of this rank as they are done, for whoever wants to know of them; see docs/metrics.md.

[Note: no waiting]
What a step leaves behind is put into a queue, and that is all that is done in the thread that trains. Another thread
comes by now and then (`Recorder.drain`), looks whether the device has come to the step's end, for which nobody waits,
and works out what it took: a few steps at a time, for while it runs Python, the one that trains cannot. On CUDA the
loss is copied to pinned memory on the step's own stream: of every step if there is a file, else now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.device import Copy
from lockstep.parallel.ddp.bucket_stamps import BucketStamps, StepStamps
from lockstep.telemetry.live.figures import Figures
from lockstep.telemetry.record.names import Event
from lockstep.telemetry.record.spikes import Spikes
from lockstep.telemetry.record.steps import has_timeline, spike_line
from lockstep.train.loop import Loop
from lockstep.train.measuring import measure
from lockstep.train.recorded_file import RecordedFile
from lockstep.train.step_record import StepRecord
from lockstep.train.stopwatch import seconds_between

_PAUSES = ("evaluation", "checkpoint", "profile")
"""Events for which training stands still."""

_PIECE, _PIECE_PAUSE_S = 32, 0.001
_BEHIND = 50_000
"""So many steps in the queue, and there are no pauses any more."""
_LOSS_EVERY_S = 0.5


class Numbers(NamedTuple):
    """What a step computed, as far as it was read from the device."""

    loss: float | None
    grad_norm: float | None
    counted: float | None


class Pending(NamedTuple):
    """A step whose figures the device may still owe."""

    record: StepRecord
    wall_s: float
    began_at: float
    values: Sequence[Tensor]
    arrived: torch.cuda.Event | None
    learning_rate: float | None
    stamps: StepStamps | None
    closely: bool
    exposed_s: float | None
    copies: Sequence[Copy]
    interval_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether the device has come to the end of all that is to be read."""
        if not self.record.watch.is_over or (self.arrived is not None and not self.arrived.query()):
            return False
        return all(end.query() for _, end in self.copies)

    def numbers(self) -> Numbers:
        """Return what was computed, if it is to be had; see ``is_known``."""
        if not self.values:
            return Numbers(None, None, None)
        loss, *others = map(float, self.values)
        norm = others.pop(0) if self.record.grad_norm is not None else None
        return Numbers(loss, norm, others.pop(0) if others else None)


class Recorder:
    """Takes the steps and events of this rank. One thread trains, another one calls `drain`.

    Args:
        loop: That is driven.
        figures: Gets what each step took.
        file: Gets the lines, if the run is recorded.
    """

    def __init__(self, loop: Loop, figures: Figures, file: RecordedFile | None = None) -> None:
        self._loop, self._figures, self._file = loop, figures, file
        self._spikes = Spikes()
        self._device = loop.device
        self._is_alone = len(loop.devices) == 1 and (loop.group is None or loop.group.size() == 1)
        stamps = BucketStamps(loop.device)
        self._stamps = stamps if loop.strategy.stamp_buckets(stamps) else None
        self._copies: list[Copy] = []
        loop.feed.copies = self._copies
        self._open: Pending | None = None  # the last step, until it is known how long it lasted
        self._queue: deque[tuple[Pending, float | None] | dict[str, Any]] = deque()
        self._draining = threading.Lock()
        self._began_at = self._wall_s = 0.0
        self._loss_at = float("-inf")
        self._is_closely = False
        self._has_ended = False
        self._paused_at: float | None = None

    def begin(self) -> None:
        """A step is about to begin."""
        self._paused_at = None
        self._is_closely = has_timeline(self._loop.num_steps_done)
        if self._stamps is not None:
            self._stamps.closely = self._is_closely
        self._wall_s, self._began_at = time.time(), time.perf_counter()
        self._release(self._began_at)

    def step(self, record: StepRecord) -> None:
        """Take a step that has just ended on the host. Does not block."""
        values, arrived = self._values_of(record)
        rate = self._loop.optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            rate = None if rate.is_cuda else float(rate)
        stamps = None if self._stamps is None else self._stamps.take()
        exposed_s = self._own_exposed_s() if stamps is None else None
        copies = self._copies[:]
        self._copies.clear()
        self._open = Pending(
            record, self._wall_s, self._began_at, values, arrived, rate, stamps, self._is_closely, exposed_s, copies
        )

    def pause(self) -> None:
        """Training stands still from now on, for the event that comes next."""
        self._paused_at = time.perf_counter()
        self._release(self._paused_at)

    def event(self, event: Event, text: str, metrics: Mapping[str, float] | None = None) -> None:
        """Take an event, for which training stood still since `pause` if that was called."""
        seconds = None
        if event in _PAUSES and self._paused_at is not None:
            seconds, self._paused_at = time.perf_counter() - self._paused_at, None
        line: dict[str, Any] = {"kind": "event", "event": event, "step": self._loop.num_steps_done}
        line |= {"time": time.time() - (seconds or 0.0), "seconds": seconds, "text": text}
        self._queue.append(line if metrics is None else {**line, "metrics": dict(metrics)})
        self._has_ended |= event in ("end", "stop")

    def finish(self) -> None:
        """Take in what is left, as there are no more steps. Blocks for the device, unless an error is on its way."""
        error = sys.exc_info()[1]
        has_failed = error is not None and not self._has_ended  # not one that fit was called in the handler of
        if error is not None and has_failed:
            first = (str(error).splitlines() or [""])[0]
            self.event("error", f"{type(error).__name__}: {first}")
        self._release(None)
        if not has_failed and self._queue and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.drain(at_once=True)

    def drain(self, *, at_once: bool = False) -> None:
        """Take in the steps that the device is done with, and the events between them; ``at_once`` without pauses."""
        with self._draining:
            self._drain(at_once=at_once)

    def _drain(self, *, at_once: bool) -> None:
        count = 0
        while self._queue:
            item = self._queue[0]
            if isinstance(item, dict):
                self._take_event(item)
            elif item[0].is_known:
                self._take(*item)
            else:
                return
            self._queue.popleft()
            count += 1
            if not at_once and count % _PIECE == 0 and len(self._queue) < _BEHIND:
                time.sleep(_PIECE_PAUSE_S)

    def _take(self, pending: Pending, interval_s: float | None) -> None:
        measured, numbers, record = measure(pending), pending.numbers(), pending.record
        self._figures.step(
            record.step,
            measured,
            interval_s=interval_s,
            num_samples=record.num_samples,
            num_tokens=numbers.counted,
            loss=numbers.loss,
            learning_rate=pending.learning_rate,
            grad_norm=numbers.grad_norm,
        )
        if pending.closely and pending.stamps is not None:
            for stamp in pending.stamps.buckets:
                if stamp.sent is not None and stamp.done is not None:
                    self._figures.bucket(stamp.position, stamp.size_bytes, seconds_between(stamp.sent, stamp.done))
        if self._file is not None:
            self._file.step(pending._replace(interval_s=interval_s), measured)
        if (text := self._spikes.look(measured)) is not None:
            self._take_event(spike_line(record.step, pending.wall_s, text))

    def _take_event(self, line: dict[str, Any]) -> None:
        self._figures.event(line)
        if self._file is not None:
            self._file.event(line)

    def _values_of(self, record: StepRecord) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Return what is to be read of the step, and the event after which it is on the host."""
        values = [value for value in (record.loss, record.grad_norm, record.count) if value is not None]
        if self._device.type != "cuda":
            return values, None
        if self._file is None and self._began_at - self._loss_at < _LOSS_EVERY_S:
            return [], None
        self._loss_at = self._began_at
        there = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
        there.copy_(torch.stack([value.detach().double() for value in values]), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self._device))
        return list(there), arrived

    def _release(self, until: float | None) -> None:
        """Take notice that the last step lasted ``until`` now."""
        if self._open is not None:
            interval_s = None if until is None else until - self._open.began_at
            self._queue.append((self._open, interval_s))
            self._open = None

    def _own_exposed_s(self) -> float | None:
        """Return what is known of exposed communication without buckets."""
        exposed_s = self._loop.strategy.exposed_s
        if exposed_s is not None and self._device.type == "cpu":
            return exposed_s * self._loop.settings.accumulate
        return 0.0 if self._is_alone else None
