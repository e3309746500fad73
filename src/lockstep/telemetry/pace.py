"""Which steps are looked at, what a rank tells of them, and who says that a rank is slow, once only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.telemetry.stragglers import Pace, Straggler, describe, find_stragglers

WINDOW = 10
"""How many steps are taken together."""

_WARM_UP = 2
"""The first steps allocate, compile and find out in which order gradients come."""
_FIRST = _WARM_UP + 2 * WINDOW
_PERIOD = 50


def is_looked_at(step: int) -> bool:
    """Return whether a step, counted from 0, is one of a window: two windows at first, then one in fifty steps."""
    if step < _FIRST:
        return step >= _WARM_UP
    return step % _PERIOD >= _PERIOD - WINDOW


def ends_window(step: int) -> bool:
    """Return whether a step, counted from 0, is the last of a window."""
    if step < _FIRST:
        return step >= _WARM_UP and (step - _WARM_UP) % WINDOW == WINDOW - 1
    return step % _PERIOD == _PERIOD - 1


class Teller:
    """Says which ranks are slow, and again only if that gets worse or comes to lie elsewhere."""

    def __init__(self, say: Callable[[str, Straggler], None]) -> None:
        self._say = say
        self._told: dict[int, tuple[str, float]] = {}

    def judge(self, paces: dict[int, Pace]) -> None:
        """Look at the paces of all ranks in one window."""
        for straggler in find_stragglers(paces):
            phase, lost_s = self._told.get(straggler.rank, ("", 0.0))
            if straggler.phase != phase or straggler.lost_s > 2 * lost_s:
                self._told[straggler.rank] = straggler.phase, straggler.lost_s
                self._say(describe(straggler), straggler)


class PaceKeeper:
    """In the launcher: compares the paces that the beacons of the ranks tell."""

    def __init__(self, on_slow: Callable[[str], None]) -> None:
        self._teller = Teller(lambda text, _: on_slow(text))
        self._windows: dict[int, dict[int, Pace]] = {}
        self._judged = -1

    def take(self, rank: int, note: dict[str, Any] | None) -> None:
        """Take what a rank told, if it told its pace."""
        if note is not None and note["window"] > self._judged:
            self._windows.setdefault(note["window"], {})[rank] = Pace(**note["pace"])

    def judge(self, num_ranks: int) -> None:
        """Say which ranks are slow if all ``num_ranks`` have told the pace of one window."""
        for window in sorted(self._windows):
            if len(self._windows[window]) >= num_ranks > 1:
                self._teller.judge(self._windows[window])
                self._judged = window
        self._windows = {window: paces for window, paces in self._windows.items() if window > self._judged}


def note_of(window: int, pace: Pace) -> dict[str, Any]:
    """Return a pace as what a beacon can write.

    Args:
        window: The number of its last step.
        pace: What is told.
    """
    return {"window": window, "pace": asdict(pace)}
