"""Records a run as it goes, every rank for itself; see docs/metrics.md.

[Note: no waiting]
What a step leaves behind is kept until the device has come to its end, which is looked for when the next step ends, and
never waited for. On CUDA its loss is copied to pinned memory on the step's own stream. Lines are encoded and written by
another thread.

[Note: when a step began]
On CPUs the host's clock says so. On CUDA a step begins when the device gets to it, which may be long after the host
has asked for it. Device times are differences of events, so each step's beginning is that of the step before plus
the difference; never earlier than the host asked for it, and never later than the host saw it done.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lockstep.data.device import Copy
from lockstep.parallel.ddp.bucket_stamps import BucketStamps, StepStamps
from lockstep.telemetry.record.thin import Thinner
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.loop import Loop
from lockstep.train.record import Event
from lockstep.train.recorded_lines import step_line, timeline_line
from lockstep.train.step_record import StepRecord
from lockstep.train.stopwatch import Mark, seconds_between

TIMELINE_FIRST, TIMELINE_STEPS = 4, 4

_SPIKE, _SPIKE_S, _SPIKE_AFTER, _MOST_SPIKES = 3.0, 0.005, 20, 200
"""A step is a spike if it takes so many times the median of those before, and so much longer; not among the first."""

_PAUSES = ("evaluation", "checkpoint")
"""Events for which training stands still."""


def has_timeline(step: int) -> bool:
    """Return whether a step has a timeline, the same on every rank: four of 64, from step 4096 on ever fewer."""
    period = max(64, 1 << (step.bit_length() - 6)) if step >= 4096 else 64
    return (step - TIMELINE_FIRST) % period < TIMELINE_STEPS


@dataclass(slots=True)
class Pending:
    """A step whose figures the device may still owe."""

    record: StepRecord
    wall_s: float
    began_at: float
    interval_s: float | None
    values: list[Tensor]
    arrived: torch.cuda.Event | None
    learning_rate: float | None
    stamps: StepStamps | None
    closely: bool
    exposed_s: float | None
    copies: list[Copy]

    @property
    def is_known(self) -> bool:
        """Whether the device has come to the end of all that is to be read."""
        events = [self.arrived] if self.arrived is not None else []
        return self.record.watch.is_over and all(event.query() for event in (*events, *(end for _, end in self.copies)))


class Recorder:
    """Takes the steps and events of this rank to its file.

    Args:
        loop: That is driven.
        writer: Of this rank's file.
    """

    def __init__(self, loop: Loop, writer: LineWriter) -> None:
        self._loop, self._writer = loop, writer
        stamps = BucketStamps(loop.device)
        self._stamps = stamps if loop.strategy.stamp_buckets(stamps) else None
        self._copies: list[Copy] = []
        loop.feed.copies = self._copies
        self._thinner = Thinner()
        self._open: Pending | None = None  # the last step, until it is known how long it lasted
        self._pending: deque[Pending] = deque()
        self._began_at = self._wall_s = 0.0
        self._totals: deque[float] = deque(maxlen=64)
        self._usual_s = 0.0
        self._num_steps = self._num_spikes = 0
        self._is_closely = False
        self._last: tuple[Mark, float] | None = None
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
        values: list[Tensor] = [record.loss] if record.grad_norm is None else [record.loss, record.grad_norm]
        arrived = None
        if record.loss.is_cuda:
            there = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            there.copy_(torch.stack([value.detach().double() for value in values]), non_blocking=True)
            values, arrived = list(there), torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self._loop.device))
        rate = self._loop.optimizer.param_groups[0]["lr"]
        self._open = Pending(
            record,
            self._wall_s,
            self._began_at,
            None,
            values,
            arrived,
            None if isinstance(rate, Tensor) and rate.is_cuda else float(rate),
            None if self._stamps is None else self._stamps.take(),
            self._is_closely,
            self._own_exposed_s(),
            self._copies[:],
        )
        self._copies.clear()

    def pause(self) -> None:
        """Training stands still from now on, for the event that comes next."""
        self._paused_at = time.perf_counter()
        self._release(self._paused_at)

    def event(self, event: Event, text: str) -> None:
        """Take an event, for which training stood still since `pause` if that was called."""
        seconds = None
        if event in _PAUSES and self._paused_at is not None:
            seconds, self._paused_at = time.perf_counter() - self._paused_at, None
        line = {"kind": "event", "event": event, "step": self._loop.num_steps_done}
        self._writer.add({**line, "time": time.time() - (seconds or 0.0), "seconds": seconds, "text": text})
        if seconds is not None:
            self._write_known()
            self._last = None  # the device has come to rest: the host's clock tells when the next step begins
        self._has_ended |= event in ("end", "stop")

    def close(self) -> None:
        """Write what is left. Blocks until the device is done, and some seconds at most for the disk."""
        error = sys.exc_info()[1]
        has_failed = error is not None and not self._has_ended  # not one that fit was called in the handler of
        if has_failed:
            first = (str(error).splitlines() or [""])[0]
            self.event("error", f"{type(error).__name__}: {first}")
        self._release(None)
        if not has_failed and self._pending and self._loop.device.type == "cuda":
            torch.cuda.synchronize(self._loop.device)
        self._write_known()
        if (rest := self._thinner.rest()) is not None:
            self._writer.add(rest)
        self._writer.close()

    def _release(self, until: float | None) -> None:
        """Take notice that the last step lasted ``until`` now, and write what is known."""
        if self._open is not None:
            self._open.interval_s = None if until is None else until - self._open.began_at
            self._pending.append(self._open)
            self._open = None
            self._write_known()

    def _own_exposed_s(self) -> float | None:
        """Return what is known of exposed communication without buckets."""
        exposed_s = self._loop.strategy.exposed_s
        if exposed_s is not None and self._loop.device.type == "cpu":
            return exposed_s * self._loop.settings.accumulate
        return 0.0 if self._loop.group is None and len(self._loop.devices) == 1 else None

    def _write_known(self) -> None:
        while self._pending:
            pending = self._pending[0]
            if not pending.is_known:
                return
            self._pending.popleft()
            self._write(pending)

    def _write(self, pending: Pending) -> None:
        began_s = self._begin_of(pending)
        line = step_line(pending, began_s, self._loop.plan.order.steps_per_epoch)
        self._look_for_spike(line)
        if (ready := self._thinner.add(line)) is not None:
            self._writer.add(ready)
        if pending.closely:
            self._writer.add(timeline_line(pending, began_s))

    def _begin_of(self, pending: Pending) -> float:
        """Return when the step began, in Unix time; see [Note: when a step began]."""
        start = pending.record.watch.start
        if isinstance(start, float):
            return pending.wall_s + (start - pending.began_at)
        began_s = pending.wall_s
        if self._last is not None:
            before, before_s = self._last
            since_s = seconds_between(before, start)
            began_s = max(began_s, min(before_s + since_s, time.time() - pending.record.watch.read().total_s))
        self._last = start, began_s
        return began_s

    def _look_for_spike(self, line: dict[str, Any]) -> None:
        total_s = line["total_s"]
        self._num_steps += 1
        is_spike = total_s > _SPIKE * self._usual_s and total_s > self._usual_s + _SPIKE_S
        if self._num_steps > _SPIKE_AFTER and is_spike and self._num_spikes < _MOST_SPIKES:
            self._num_spikes += 1
            parts = ("data_wait_s", "forward_s", "backward_s", "exposed_s", "optimizer_s")
            part = max(parts, key=lambda name: line[name] or 0.0)
            name = {"exposed_s": "waiting for gradients"}.get(part, part[:-2].replace("_", " "))
            text = f"took {total_s * 1e3:.1f} ms, usually {self._usual_s * 1e3:.1f} ms; "
            text += f"{(line[part] or 0) * 1e3:.1f} ms of it {name}"
            self._writer.add(
                {
                    "kind": "event",
                    "event": "spike",
                    "step": line["step"] + 1,
                    "time": line["time"],
                    "seconds": None,
                    "text": text,
                }
            )
        self._totals.append(total_s)
        if self._num_steps % 16 == 0 or self._num_steps == _SPIKE_AFTER:
            self._usual_s = median(self._totals)
