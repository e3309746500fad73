"""A rank that keeps the others waiting in every step: pure functions of the steps of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low

from lockstep.study.report.lines import Step
from lockstep.study.report.together import Together
from lockstep.telemetry.stragglers import PHASES, StepTimes, Straggler, find_stragglers, pace_of

_MOSTLY_LAST = 2 / 3
"""In so many steps a slow rank comes last at least; in more of few, where chance does much."""

_MIN_STEPS = 20
_MIN_SHARE = 0.15
"""What it costs then, of a step; less may come from what disturbs them."""


def find_slow_rank(steps: Sequence[Together]) -> Straggler | None:
    """Return the rank that keeps the others waiting, or None.

    As long as nothing disturbs the ranks, a good step of such a rank takes longer than a bad one of the others. Where
    something does, on a busy machine, their steps are compared one by one: what slows all of them down drops out.
    """
    paces = {rank: pace_of([_times(step.ranks[rank]) for step in steps]) for rank in steps[0].ranks}
    return next(iter(find_stragglers(paces)), None) or _mostly_last(steps)


def _mostly_last(steps: Sequence[Together]) -> Straggler | None:
    """Return the rank that comes last in most steps, if that costs the others a part of a step worth a word."""
    ranks = steps[0].ranks
    count = {rank: sum(step.last_rank == rank for step in steps) for rank in ranks}
    slow = max(count, key=lambda rank: count[rank])
    by_chance = 0.5 + 1.5 / math.sqrt(len(steps))  # three standard deviations above that of one of two alike
    if len(steps) < _MIN_STEPS or count[slow] < max(_MOSTLY_LAST, by_chance) * len(steps):
        return None
    times = {rank: [_times(step.ranks[rank]) for step in steps] for rank in ranks}
    others = [rank for rank in ranks if rank != slow]

    def later(phase: str | None) -> float:
        """Return by how much the rank is later than is usual among the others: the median over the steps."""

        def read(rank: int, place: int) -> float:
            at = times[rank][place]
            return at.own_s if phase is None else float(getattr(at, phase))

        places = range(len(steps))
        return median(read(slow, place) - median_low(read(rank, place) for rank in others) for place in places)

    lost_s, step_s = later(None), median(step.lasted_s for step in steps)
    if lost_s < _MIN_SHARE * step_s:
        return None
    phase = max(PHASES, key=later)
    took_s = median(getattr(at, phase) for at in times[slow])
    return Straggler(slow, phase, lost_s, took_s, took_s - later(phase), step_s)


def _times(step: Step) -> StepTimes:
    return StepTimes(
        loader=step.data_wait_s,
        forward=step.forward_s,
        backward=step.backward_s,
        optimizer=step.optimizer_s,
        waits=step.exposed_s or 0.0,
    )
