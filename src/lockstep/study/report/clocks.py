"""The ranks' clocks on one: what was measured at the beginning and at the end of each session, and a line between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reading:
    """How far a rank's clock is ahead of rank zero's, within an error, at a time; all in seconds."""

    time: float
    offset_s: float
    error_s: float


@dataclass(frozen=True)
class Clock:
    """A rank's clock, by sessions in their order; each has the readings of its beginning and maybe its end."""

    sessions: Sequence[Sequence[Reading]]

    def offset_s(self, time: float) -> float:
        """Return how far the clock is ahead at ``time``: on a line through the readings of that session."""
        begun = [readings for readings in self.sessions if readings and readings[0].time <= time]
        readings = begun[-1] if begun else next((each for each in self.sessions if each), [])
        if not readings:
            return 0.0
        first, last = readings[0], readings[-1]
        if last.time <= first.time:
            return first.offset_s
        share = min(1.0, max(0.0, (time - first.time) / (last.time - first.time)))
        return first.offset_s + share * (last.offset_s - first.offset_s)

    @property
    def error_s(self) -> float:
        """The largest error of any reading."""
        return max((reading.error_s for readings in self.sessions for reading in readings), default=0.0)


def clock_of(sessions: Sequence[dict[str, Any]], rank: int) -> Clock:
    """Return the clock of a rank as ``run.json`` tells it; a session that tells nothing has no readings."""
    return Clock([_readings(session.get("clocks"), rank) for session in sessions])


def _readings(clocks: Any, rank: int) -> list[Reading]:
    found = []
    for name in ("start", "end"):
        clock = clocks.get(name) if isinstance(clocks, dict) else None
        if isinstance(clock, dict):
            time = clock.get("time")
            offset_s, error_s = (_at(clock.get(key), rank) for key in ("offsets_s", "errors_s"))
            if isinstance(time, (int, float)) and offset_s is not None:
                found.append(Reading(float(time), offset_s, error_s or 0.0))
    return found


def _at(values: Any, rank: int) -> float | None:
    value = values[rank] if isinstance(values, list) and rank < len(values) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
