"""Takes the steps of one rank, and the paces of all ranks; says when a rank is persistently slow, and once only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.monitor.stragglers import WINDOW, Pace, StepTimes, Straggler, describe, find_stragglers, pace_of

_WARM_UP = 3
"""The first steps allocate, compile and find out in which order gradients come."""


class Steps:
    """Collects the steps of this rank; every ``WINDOW`` of them its pace."""

    def __init__(self) -> None:
        self._skip = _WARM_UP
        self._steps: list[StepTimes] = []
        self.num_windows = 0

    def add(self, step: StepTimes) -> Pace | None:
        """Add one; return the pace if a window is full."""
        if self._skip:
            self._skip -= 1
            return None
        self._steps.append(step)
        if len(self._steps) < WINDOW:
            return None
        pace, self._steps = pace_of(self._steps), []
        self.num_windows += 1
        return pace


class Teller:
    """Says which ranks are slow, and again only if that changes."""

    def __init__(self, say: Callable[[str, Straggler], None]) -> None:
        self._say = say
        self._told: dict[int, tuple[str, float]] = {}

    def judge(self, paces: dict[int, Pace]) -> None:
        """Look at the paces of all ranks in one window."""
        found = find_stragglers(paces)
        for straggler in found:
            phase, lost_s = self._told.get(straggler.rank, ("", 0.0))
            if straggler.phase != phase or straggler.lost_s > 2 * lost_s:
                self._told[straggler.rank] = straggler.phase, straggler.lost_s
                self._say(describe(straggler), straggler)


class PaceKeeper:
    """In the launcher: compares the paces that the beacons of the ranks tell."""

    def __init__(self, on_slow: Callable[[str], None]) -> None:
        self._teller = Teller(lambda text, _: on_slow(text))
        self._windows: dict[int, dict[int, Pace]] = {}
        self._judged = 0

    def take(self, rank: int, note: dict[str, Any] | None) -> None:
        """Take what a rank told, if it told its pace."""
        if note is not None and note["window"] > self._judged:
            self._windows.setdefault(note["window"], {})[rank] = Pace(**note["pace"])

    def judge(self, num_ranks: int) -> None:
        """Say which ranks are slow if all ``num_ranks`` have told the pace of one window."""
        complete = [window for window, paces in self._windows.items() if len(paces) >= num_ranks > 1]
        for window in sorted(complete):
            self._teller.judge(self._windows[window])
            self._judged = window
        self._windows = {window: paces for window, paces in self._windows.items() if window > self._judged}


def note_of(window: int, pace: Pace) -> dict[str, Any]:
    """Return a pace as what a beacon can write."""
    return {"window": window, "pace": asdict(pace)}
