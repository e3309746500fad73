"""Where the time of a step goes: laps on the host's clock, or events of the device that nothing waits for."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import activity
from lockstep.accelerator import mark_on
from lockstep.telemetry import ranges
from lockstep.telemetry.run_record import PHASES, Mark, seconds_between

# By phase that ends, the one that begins; after the optimizer there is none.
_NEXT = {"data_wait": "forward", "forward": "backward", "backward": "data_wait", "communication": "optimizer"}


class PhaseSeconds(NamedTuple):
    """Seconds of a step by what they went into.

    ``backward_s`` holds the gradient communication, overlapped or not; ``communication_s`` only what is left to wait
    for after it, such as the sum of the losses.
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
    """Sorts the time of one step into phases; on a device it is the device's time, and read only after the step.

    While somebody profiles (`ranges.now`), each phase is a range in the trace as well.

    Args:
        device: Whose time it is.

    Attributes:
        begin, wall_s, began_at: When the step began: as a mark, in Unix time, and by ``time.perf_counter``.
        end: The last mark.
        spans: Phase, begin, end, and the seconds that the host spent in blocking collectives meanwhile.
        waits: Within backward, from when this rank's own work was done until all ranks' was, of engines that do not
            report that themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._range: ExitStack | None = None
        self.wall_s, self.began_at = time.time(), time.perf_counter()
        self.begin = self.end = mark_on(device)
        self.spans: list[tuple[str, Mark, Mark, float]] = []
        self.waits: list[tuple[Mark, Mark]] = []
        self._waited_s = activity.now.waited_s
        activity.now.phase = "loader"
        if ranges.now is not None:
            self.name_phase("data_wait")

    def lap(self, phase: str, *, at: Mark | None = None) -> None:
        """Count the time since the last lap, up to now or the moment ``at``, as ``phase``."""
        mark = mark_on(self._device) if at is None else at
        waited_s = activity.now.waited_s
        self.spans.append((phase, self.end, mark, waited_s - self._waited_s))
        self.end, self._waited_s = mark, waited_s
        follows = _NEXT.get(phase, "")
        activity.now.phase = "loader" if follows == "data_wait" else follows
        if at is None and (ranges.now is not None or self._range is not None):
            # Samples that come next are asked for right behind a backward, and waited for when the next lap begins.
            asked_ahead = phase == "data_wait" and len(self.spans) > 1 and self.spans[-2][0] != "data_wait"
            self.name_phase("data_wait" if asked_ahead else follows)

    def mark_waits_counted(self) -> None:
        """Note that what backward waited for is a lap of its own or counted in `spans`."""
        now = mark_on(self._device)
        self.waits.append((now, now))

    def name_phase(self, name: str) -> None:
        """End the range of the phase before and begin another, for a profiler; none if ``name`` is empty."""
        if self._range is not None:
            self._range.close()
        self._range = ranges.now.open(name) if name and ranges.now is not None else None


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. Reading a number waits for the device to get there; nothing else does.

    Args:
        step: Counted from 0 over all epochs.
        num_samples: Samples of the global batch.
        loss: Mean over the global batch, a 0-dimensional tensor.
        grad_norm: Global norm of the gradient before clipping, if it was needed.
        updated: Whether the optimizer was stepped; not after an overflow in fp16, nor without synchronisation.
        count: What the loss is a mean over if that is not samples, such as tokens; a 0-dimensional tensor.
        timer: Where its time went.
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
        """Seconds of the step on this rank, by what they went into. Blocks on a device until its last lap is over."""
        if isinstance(self.timer.end, torch.Event):
            self.timer.end.synchronize()
        taken = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end, _ in self.timer.spans:
            taken[phase] += seconds_between(begin, end)
        return PhaseSeconds(*taken.values())
