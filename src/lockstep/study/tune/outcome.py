"""What came of a tuning, as plain frozen figures: the tables, the file and the tests read only these."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.common import Spread
from lockstep.study.tune.effects import Effect
from lockstep.study.tune.open_stage import Result
from lockstep.study.tune.search import ADVICE, TOGETHER, Search
from lockstep.study.tune.values import Values

_FEWEST = 3
"""Rounds without which nothing is said of a prediction."""


@dataclass(frozen=True)
class Check:
    """An advice beside what came of following it.

    Args:
        cause: What the advice goes by.
        change: What it says to do.
        predicted: The gain that it predicts.
        at_most: Whether that is a bound.
        measured: The gain; None if it was not tried.
        why: Why not.
    """

    cause: str
    change: str
    predicted: float
    at_most: bool
    measured: Spread | None
    why: str = ""

    @property
    def error(self) -> float | None:
        """How far the prediction is off, relative to what was measured; a bound that holds is not off."""
        if self.measured is None:
            return None
        off = self.predicted / self.measured.median - 1
        return 0.0 if self.at_most and off >= 0 else off


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Args:
        task: Its name.
        device: ``cpu`` or ``cuda``.
        num_devices: That took part.
        num_cores: Of this machine.
        global_batch_size: Samples of a step, the same before and after.
        start: The settings that it began with.
        found: Those that it ended with.
        effect: What becomes of the training from the one to the other.
        results: Of all changes, in the order in which they were tried.
        skips: By stage, why there was nothing to try.
        checks: Of the advice.
        total: How many times as fast all of it is together; None if that was not measured.
        memory: What is known of the memory of micro-batches, in words.
        notes: What else there is to say.
        seconds: How long it took.
        interrupted: Whether somebody did not want to wait for the end.
    """

    task: str
    device: str
    num_devices: int
    num_cores: int
    global_batch_size: int
    start: Values
    found: Values
    effect: Effect
    results: tuple[Result, ...]
    skips: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]
    total: Spread | None
    memory: str
    notes: tuple[str, ...]
    seconds: float
    interrupted: bool = False

    @property
    def kept(self) -> list[Result]:
        """What is part of what was found, in the order in which it was found."""
        kept = [result for result in self.results if result.kept and result.stage != TOGETHER]
        return kept if self.found != self.start else []


def checks_of(search: Search) -> tuple[Check, ...]:
    """Return the advice beside what was measured."""
    tried = [result for result in search.results if result.stage == ADVICE]
    found = []
    for advice in (search.baseline or {}).get("advice", []):
        result = next((each for each in tried if each.candidate.changes == advice["changes"]), None)
        why = "no setting to try" if result is None else ""
        measured = None if result is None or result.num_rounds < _FEWEST else result.ratio
        if result is not None and measured is None:
            why = result.why
        found.append(Check(advice["cause"], advice["change"], advice["gain"], advice["at_most"], measured, why))
    return tuple(found)


def memory_in_words(search: Search) -> str:
    """Return what is known of the memory of micro-batches; nothing if it was not looked at."""
    climb = search.climb
    size = climb.largest
    if size is None:
        return ""
    samples = f"{size} sample{'s' * (size > 1)}"
    needed = f"{climb.peaks[size] / 2**20:,.0f} MiB"
    if climb.limit_bytes is not None:
        needed += f", of {climb.limit_bytes / 2**20:,.0f} MiB that each may use"
    if search.largest is None:
        return f"Micro-batches of {samples} fit on every device, and larger ones were not tried: {needed}."
    part = "a device's whole part of the global batch"
    if size < climb.share:
        part = f"the part of {climb.share} is cut into {climb.share // size}"
    return f"The largest micro-batch that fits on every device has {samples} ({part}): {needed}."
