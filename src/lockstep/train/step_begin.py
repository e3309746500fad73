"""When steps began, on the clock of this rank's host.

[Note: when a step began]
On CPUs the host's clock says so. On CUDA a step begins when the device gets to it, which may be long after the host
has asked for it. Device times are differences of events, so each step's beginning is that of the step before plus
the difference; never earlier than the host asked for it, and never later than the host saw it done.
"""

from __future__ import annotations

import time

from lockstep.train.stopwatch import Mark, seconds_between


class StepBegin:
    """Tells of each step when it began; asked in their order, when the device is done with them."""

    def __init__(self) -> None:
        self._last: tuple[Mark, float] | None = None

    def of(self, start: Mark, *, wall_s: float, began_at: float, total_s: float) -> float:
        """Return when a step began, in Unix time; see [Note: when a step began].

        Args:
            start: Its first mark.
            wall_s: When the host asked for it, in Unix time.
            began_at: The same by the clock that host marks are of.
            total_s: How long it took.
        """
        if isinstance(start, float):
            return wall_s + (start - began_at)
        began_s = wall_s
        if self._last is not None:
            before, before_s = self._last
            began_s = max(began_s, min(before_s + seconds_between(before, start), time.time() - total_s))
        self._last = start, began_s
        return began_s

    def forget(self) -> None:
        """Take notice that the device has come to rest: the host's clock tells when the next step begins."""
        self._last = None
