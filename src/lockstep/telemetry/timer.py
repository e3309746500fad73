"""Times a step where it runs: in `fit`, and in a script that is observed."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from lockstep import activity
from lockstep.accelerator import mark_on
from lockstep.telemetry import ranges
from lockstep.telemetry.step_times import Mark, StepMarks

# A mark, the time of the host, its time in our collectives so far, and its use of cores so far; a tuple for speed.
Moment = tuple[Mark, float, float, bytes]


def moment(device: torch.device) -> Moment:
    """Return the present moment, on the stream of ``device``. Does not block."""
    at = time.perf_counter()
    # On CPU, the time of the host is also the mark, which saves a call.
    return (at if device.type == "cpu" else mark_on(device)), at, activity.now.waited_s, activity.core_use()


class StepTimer:
    """Takes down the phases of one step where they begin, as marks: no call waits for the device.

    A phase lasts until the next one begins. During profiling (`ranges.now`), it is also a range in the
    trace. The first phase is ``data_wait``.

    Args:
        device: The device whose time is measured.
        number: The number of the step, counted from 0.

    Attributes:
        marks: The step so far.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._device = device
        self._range = ExitStack()
        self._since = moment(device)
        mark, at, *_ = self._since
        self.marks = StepMarks(number, mark, at, time.time(), mark)
        self._phase, activity.now.phase = "data_wait", "loader"
        if ranges.now:
            self.name_phase("data_wait")

    def begin(self, phase: str, *, at: Mark | None = None) -> None:
        """End the phase before, now or at the mark ``at``, and begin ``phase``, one of `PHASES`; "" after the last."""
        since, self._since = self._since, moment(self._device)
        if at is not None:  # the host's waits and its use of cores until now belong to the phase that ends
            self._since = (at, *self._since[1:])
        add_span(self.marks, self._phase, since, self._since)
        self.marks.end = self._since[0]
        self._phase = phase
        activity.now.phase = "loader" if phase == "data_wait" else phase
        # A range of the trace cannot begin earlier: at a mark, that of the phases before goes on.
        if at is None and ranges.now:
            self.name_phase(phase)

    def name_phase(self, name: str) -> None:
        """End the profiler's range of the phase, and begin another; none if ``name`` is empty."""
        self._range.close()
        if ranges.now and name:
            self._range.enter_context(ranges.around(name))


def add_span(step: StepMarks, phase: str, begin: Moment, end: Moment) -> None:
    """Add a phase to ``step``."""
    step.spans.append((phase, begin[0], end[0], end[2] - begin[2]))
    step.core_uses.append((begin[3], end[3]))
