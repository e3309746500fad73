"""The phases of a step as ranges for a profiler: each begins where the one before ends."""

from __future__ import annotations

from lockstep.telemetry import ranges
from lockstep.telemetry.ranges import Range, Ranges

_NEXT = {"data_wait_s": "forward", "forward_s": "backward", "backward_s": "data_wait", "communication_s": "optimizer"}
"""By phase that ends, the one that begins; after the optimizer there is none."""


class PhaseRanges:
    """The phase that a step is in, as a range.

    Args:
        made_by: Who makes them.
    """

    def __init__(self, made_by: Ranges) -> None:
        self._made_by = made_by
        self._open: Range | None = None
        self._ended = ""
        self.begin("data_wait")

    def begin(self, name: str) -> None:
        """End the phase that there is, and begin another."""
        self.end()
        self._open = self._made_by.open(name)

    def lap(self, phase: str) -> None:
        """Take notice that ``phase`` has ended, by its name in a `Stopwatch`."""
        follows = _NEXT.get(phase)
        if phase == "data_wait_s" and self._ended not in ("", "data_wait_s"):
            follows = "data_wait"  # samples to come were asked for; now they are waited for
        self._ended = phase
        self.end()
        if follows is not None:
            self.begin(follows)

    def end(self) -> None:
        """End the phase that there is."""
        if self._open is not None:
            self._open.close()
            self._open = None


def follow_phases() -> PhaseRanges | None:
    """Return what names the phases of the coming step, if somebody looks."""
    return None if ranges.now is None else PhaseRanges(ranges.now)
