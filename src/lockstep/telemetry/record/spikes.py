"""Finds the steps that took far longer than those before."""

from __future__ import annotations

from collections import deque
from statistics import median

from lockstep.telemetry.record.measured import PART_NAMES, Measured

_TIMES, _LONGER_S, _AFTER, _MOST = 3.0, 0.005, 20, 200
"""A step is a spike if it takes so many times the median of those before, and so much longer; not among the first."""


class Spikes:
    """Looks at each step in turn."""

    def __init__(self) -> None:
        self._totals: deque[float] = deque(maxlen=64)
        self._usual_s = 0.0
        self._num_steps = self._num_found = 0

    def look(self, measured: Measured) -> str | None:
        """Return what to say of the next step if it is a spike."""
        total_s, usual_s = measured.total_s, self._usual_s
        self._num_steps += 1
        self._totals.append(total_s)
        found = None
        if total_s > _TIMES * usual_s and total_s > usual_s + _LONGER_S and self._num_steps > _AFTER:
            self._num_found += 1
            found = describe(measured, usual_s) if self._num_found <= _MOST else None
        if self._num_steps % 16 == 0 or self._num_steps == _AFTER:
            self._usual_s = median(self._totals)
        return found


def describe(measured: Measured, usual_s: float) -> str:
    """Say how long a step took, and in what most of it was."""
    part = max(PART_NAMES, key=lambda name: getattr(measured, name) or 0.0)
    text = f"took {measured.total_s * 1e3:.1f} ms, usually {usual_s * 1e3:.1f} ms; "
    return text + f"{(getattr(measured, part) or 0.0) * 1e3:.1f} ms of it {PART_NAMES[part]}"
