"""Which rank is persistently slow, in which phase, and by how much: pure functions of what the ranks' steps took.

[Note: own work, waiting, wire]
All ranks leave a reduction at the same time, so between two of them each has the same time; what differs is how it is
divided. A rank's *own work* of a step ends when its last bucket is ready, which is stamped before that bucket's
collective starts; what follows until the gradients are there is no work of its own. The rank that comes last waits for
the wire only, so the shortest such wait of all ranks is the *wire* time, and what a rank waits longer it waits for its
*peers*. No clocks are compared, so none need to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low, quantiles

PHASES = ("loader", "forward", "backward", "optimizer")

_MIN_SHARE = 0.1
"""A rank is called slow if it loses at least this part of a step ..."""
_MIN_LOST_S = 0.001
"""... and at least this long."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one rank's step: what it worked on by phase, and what it waited for others and the wire."""

    loader: float
    forward: float
    backward: float
    optimizer: float
    waits: float

    @property
    def own_s(self) -> float:
        """Seconds of its own work."""
        return self.loader + self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Pace:
    """The steps of one rank in a window: medians by phase, and the quartiles of its own work; in seconds."""

    phases: Mapping[str, float]
    waits_s: float
    low_s: float
    high_s: float

    @property
    def own_s(self) -> float:
        """Seconds of own work in a step."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class Division:
    """How one rank's step is divided; in seconds."""

    own_s: float
    peers_s: float
    wire_s: float


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting in every step; times in seconds a step."""

    rank: int
    phase: str
    lost_s: float
    took_s: float
    usual_s: float
    step_s: float


def pace_of(steps: Sequence[StepTimes]) -> Pace:
    """Return the pace of at least two steps."""
    low_s, _, high_s = quantiles((step.own_s for step in steps), n=4, method="inclusive")
    phases = {phase: median(getattr(step, phase) for step in steps) for phase in PHASES}
    return Pace(phases, median(step.waits for step in steps), low_s, high_s)


def divide(paces: Mapping[int, Pace]) -> dict[int, Division]:
    """Divide each rank's step into own work, waiting for peers, and the wire; see [Note: own work, waiting, wire]."""
    wire_s = min(pace.waits_s for pace in paces.values())
    return {rank: Division(pace.own_s, pace.waits_s - wire_s, wire_s) for rank, pace in paces.items()}


def find_stragglers(paces: Mapping[int, Pace]) -> list[Straggler]:
    """Return the ranks that are persistently slower than most, the slowest first.

    A rank is compared with the (lower) median of all. It is persistently slower if a good step of its takes longer than
    a bad one of the others: its lower quartile is above the median of their upper ones.
    """
    if len(paces) < 2:
        return []
    usual = {phase: median_low(pace.phases[phase] for pace in paces.values()) for phase in PHASES}
    usual_own_s = median_low(pace.own_s for pace in paces.values())
    usual_high_s = median_low(pace.high_s for pace in paces.values())
    step_s = max(pace.own_s + pace.waits_s for pace in paces.values())
    found = []
    for rank, pace in paces.items():
        lost_s = pace.own_s - usual_own_s
        if lost_s < max(_MIN_LOST_S, _MIN_SHARE * step_s) or pace.low_s <= usual_high_s:
            continue
        phase = max(PHASES, key=lambda phase: pace.phases[phase] - usual[phase])
        found.append(Straggler(rank, phase, lost_s, pace.phases[phase], usual[phase], step_s))
    return sorted(found, key=lambda straggler: -straggler.lost_s)


def describe(straggler: Straggler) -> str:
    """Say it in one line."""
    return (
        f"rank {straggler.rank} is slow: it loses {_ms(straggler.lost_s)} in each step of {_ms(straggler.step_s)}, "
        f"in {straggler.phase} ({_ms(straggler.took_s)}, usual is {_ms(straggler.usual_s)}); the others wait for it"
    )


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
