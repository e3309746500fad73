"""The time of a step by phase: from the host's clock, or from events of the device without waiting for them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import activity, env
from lockstep.accelerator import mark_on, synchronize
from lockstep.telemetry import ranges
from lockstep.telemetry.run_record import PHASES, Mark, seconds_between

# By phase, the next phase; there is none after the optimizer.
_NEXT = {"data_wait": "forward", "forward": "backward", "backward": "data_wait", "communication": "optimizer"}


class PhaseSeconds(NamedTuple):
    """Seconds of a step by phase.

    ``backward_s`` includes the gradient communication, overlapped or not. ``communication_s`` is the wait after it,
    such as for the sum of the losses.
    """

    data_wait_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self)


class StepTimer:
    """Divides the time of one step into phases; on a device it is the device's time, which is read after the step.

    During profiling (`ranges.now`), each phase is also a range in the trace.

    Args:
        device: The device whose time is measured.

    Attributes:
        begin, wall_s, began_at: The start of the step: as a mark, in Unix time, and by ``time.perf_counter``.
        end: The last mark.
        spans: Phase, begin, end, and the seconds that the host spent in blocking collectives in between.
        core_uses: CPU usage of the training thread at the beginning and at the end of each span.
        waits: Waits for other ranks within backward, for engines that do not report them themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._range: AbstractContextManager[object] | None = None
        self.wall_s, self.began_at = time.time(), time.perf_counter()
        self.begin = self.end = mark_on(device)
        self.spans: list[tuple[str, Mark, Mark, float]] = []
        self.waits: list[tuple[Mark, Mark]] = []
        self.core_uses: list[tuple[bytes, bytes]] = []
        self._core_use = env.core_use()
        self._waited_s = activity.now.waited_s
        activity.now.phase = "loader"
        if ranges.now:
            self.name_phase("data_wait")

    def lap(self, phase: str, *, at: Mark | None = None) -> None:
        """Count the time since the last lap, up to now or the moment ``at``, as ``phase``."""
        mark = mark_on(self._device) if at is None else at
        waited_s = activity.now.waited_s
        self.spans.append((phase, self.end, mark, waited_s - self._waited_s))
        self.end, self._waited_s = mark, waited_s
        before, self._core_use = self._core_use, env.core_use()
        self.core_uses.append((before, self._core_use))
        follows = _NEXT.get(phase, "")
        activity.now.phase = "loader" if follows == "data_wait" else follows
        if at is None and (ranges.now or self._range is not None):
            # The next samples are requested right after a backward, and waited for when the next lap begins.
            asked_ahead = phase == "data_wait" and len(self.spans) > 1 and self.spans[-2][0] != "data_wait"
            self.name_phase("data_wait" if asked_ahead else follows)

    def mark_waits_counted(self) -> None:
        """Record that the waits of backward are a separate lap or counted in `spans`."""
        now = mark_on(self._device)
        self.waits.append((now, now))

    def name_phase(self, name: str) -> None:
        """End the profiler range of the previous phase and begin another; none if ``name`` is empty."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if name and ranges.now:
            self._range = ranges.around(name)
            self._range.__enter__()


@dataclass(frozen=True)
class StepRecord:
    """The result of a step. Only reading a number waits for the device.

    Args:
        step: Counted from 0 over all epochs.
        num_samples: Number of samples of the global batch.
        loss: Mean over the global batch, a 0-dimensional tensor.
        grad_norm: Global norm of the gradient before clipping, if it was needed.
        updated: Whether the optimizer made a step; False after an overflow in fp16, and without synchronisation.
        count: Number of items, such as tokens, that the loss is a mean over, a 0-dimensional tensor; None: samples.
        timer: The time by phase.
    """

    step: int
    num_samples: int
    loss: Tensor
    grad_norm: Tensor | None
    updated: bool
    count: Tensor | None
    timer: StepTimer = field(repr=False)

    @property
    def times(self) -> PhaseSeconds:
        """Seconds of the step on this rank by phase. Blocks on a device until its last lap is over."""
        if isinstance(self.timer.end, torch.Event):
            synchronize(self.timer.end)
        taken = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end, _ in self.timer.spans:
            taken[phase] += seconds_between(begin, end)
        return PhaseSeconds(*taken.values())
