"""How long a run will take yet."""

from __future__ import annotations

import time


class TimeLeft:
    """Guesses from the steps since the first one that was seen done, pauses and all.

    Args:
        num_steps: Of the whole run.
        first_step: Steps done before.
    """

    def __init__(self, num_steps: int, first_step: int) -> None:
        self._num_steps, self._first_step = num_steps, first_step
        self._began_s = time.perf_counter()
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self._began_s

    def reached(self, step: int) -> None:
        """Take notice that ``step`` steps are done."""
        now_s = time.perf_counter()
        if step > self._first_step and self._first is None:
            self._first = step, now_s  # the first steps allocate and compile: they say little
        if self._last is None or step != self._last[0]:
            self._last = step, now_s

    def seconds(self) -> float | None:
        """Return the seconds until the end at the pace so far; None if no pace is known yet."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None
        (first, first_s), (last, last_s) = self._first, self._last
        since_s = time.perf_counter() - last_s
        return max(0.0, (last_s - first_s) / (last - first) * (self._num_steps - last) - since_s)
