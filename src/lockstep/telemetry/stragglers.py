"""Finds ranks that are persistently slow, with the phase and the lost time.

[Note: own work, waiting, wire]
All ranks leave a reduction at the same time, so the time between two reductions is the same for all. A rank's *own
work* in a step ends when its last bucket is ready, before the collective of that bucket starts. After that, it waits
for the gradients. The last rank waits only for the transfer, so the shortest wait of all ranks is the *wire* time, and
the additional wait of another rank is waiting for its *peers*. Clocks of different machines are not compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low, quantiles

from lockstep.telemetry.step_times import OWN_PARTS, PARTS, StepTimes, milliseconds

# A slow rank loses at least this share of a step ...
_MIN_SHARE = 0.1
# ... and at least so many seconds.
_MIN_LOST_S = 0.001


@dataclass(frozen=True)
class Pace:
    """The steps of one rank in a window, in seconds: medians by phase, and quartiles of its own work."""

    phases: Mapping[str, float]
    waits_s: float
    low_s: float
    high_s: float

    @property
    def own_s(self) -> float:
        """Seconds of own work in a step."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting in every step; ``phase`` is one of `PARTS`, times are seconds per step."""

    rank: int
    phase: str
    lost_s: float
    took_s: float
    usual_s: float
    step_s: float


def pace_of(steps: Sequence[StepTimes]) -> Pace:
    """Return the pace of at least two steps."""
    # Medians and quartiles, so that single slow steps, as after a checkpoint, do not count.
    low_s, _, high_s = quantiles((step.own_s for step in steps), n=4, method="inclusive")
    phases = {part: median(step.part(part) for step in steps) for part in OWN_PARTS}
    return Pace(phases, median(step.exposed_s or 0.0 for step in steps), low_s, high_s)


def find_stragglers(paces: Mapping[int, Pace]) -> list[Straggler]:
    """Return the ranks that are persistently slower than most, the slowest first."""
    if len(paces) < 2:
        return []
    # The lower median: of two ranks, the faster one counts as usual.
    usual = {phase: median_low(pace.phases[phase] for pace in paces.values()) for phase in OWN_PARTS}
    usual_own_s = median_low(pace.own_s for pace in paces.values())
    usual_high_s = median_low(pace.high_s for pace in paces.values())
    step_s = max(pace.own_s + pace.waits_s for pace in paces.values())
    found = []
    for rank, pace in paces.items():
        lost_s = pace.own_s - usual_own_s
        # Persistently slower: its fast steps take longer than slow steps of the others.
        if lost_s >= max(_MIN_LOST_S, _MIN_SHARE * step_s) and pace.low_s > usual_high_s:
            phase = max(OWN_PARTS, key=lambda phase: pace.phases[phase] - usual[phase])
            found.append(Straggler(rank, phase, lost_s, pace.phases[phase], usual[phase], step_s))
    return sorted(found, key=lambda straggler: -straggler.lost_s)


def describe(straggler: Straggler) -> str:
    """Return a message about a straggler."""
    phase = PARTS[straggler.phase].doing
    times = (straggler.lost_s, straggler.step_s, straggler.took_s, straggler.usual_s)
    lost, step, took, usual = map(milliseconds, times)
    return (
        f"rank {straggler.rank} is slow: it loses {lost} in each step of {step}, in {phase} ({took}, usual is {usual})"
        "; the others wait for it"
    )


# --- the steps that are measured, and the reports ---------------------------------------------------------------------

# Steps of a window.
WINDOW = 10

# The first steps allocate, compile and find the order of gradients.
_WARM_UP = 2
_PERIOD = 50


def is_looked_at(step: int) -> bool:
    """Return whether a step, counted from 0, is in a window."""
    return step in _window(step)


def ends_window(step: int) -> bool:
    """Return whether a step, counted from 0, is the last of a window."""
    return step == _window(step)[-1]


def _window(step: int) -> range:
    """Return the first window that ends at ``step`` or later: two at the start, then one per fifty steps."""
    soon = (_WARM_UP + WINDOW - 1, _WARM_UP + 2 * WINDOW - 1)
    end = next((end for end in soon if step <= end), step // _PERIOD * _PERIOD + _PERIOD - 1)
    return range(end - WINDOW + 1, end + 1)


class StragglerReporter:
    """Reports which ranks are slow, and again only if a rank gets slower or is slow in another phase."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: dict[int, tuple[str, float]] = {}

    def judge(self, paces: dict[int, Pace]) -> None:
        """Compare the paces of all ranks in a window."""
        for straggler in find_stragglers(paces):
            phase, lost_s = self._reported.get(straggler.rank, ("", 0.0))
            if straggler.phase != phase or straggler.lost_s > 2 * lost_s:
                self._reported[straggler.rank] = straggler.phase, straggler.lost_s
                self._report(describe(straggler))
