"""What a record says in numbers: pure functions from the ranks' steps to where the time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lockstep.study.report.lines import Event
from lockstep.study.report.read import Recorded
from lockstep.study.report.slow_rank import find_slow_rank
from lockstep.study.report.together import PARTS, Parts, steps_together
from lockstep.telemetry.stragglers import Straggler

NUM_FIRST = 5
"""The first steps allocate, compile and find out in which order gradients come; they are left out of the means."""

_SPIKE = 3.0


@dataclass(frozen=True)
class Figures:
    """What a record says in numbers.

    Args:
        num_steps: That the means are over.
        step_s: From the beginning of a step to that of the next: the median.
        slow_step_s: Of twenty steps, one takes longer than this.
        samples_per_s: Over all steps but the first and spikes.
        tokens_per_s: Likewise of what the loss counts, if that is not samples.
        total_s: From the beginning of the first step to the end of the last.
        paused_s: What training stood still for checkpoints and evaluations, by event.
        by_rank: Means over the steps, spikes left out.
        critical: The same along the critical path; see [Note: the rank that all wait for].
        last_share: By rank, the share of steps in which it came last.
        knows_waits: Whether waiting for communication was measured.
        straggler: A rank that keeps the others waiting in every step, if there is one.
    """

    num_steps: int
    step_s: float
    slow_step_s: float
    samples_per_s: float
    total_s: float
    paused_s: Mapping[str, float]
    by_rank: Mapping[int, Parts]
    critical: Parts
    last_share: Mapping[int, float]
    knows_waits: bool
    straggler: Straggler | None
    tokens_per_s: float | None = None


def find_figures(run: Recorded) -> Figures | None:
    """Return what the steps say that all ranks have recorded; None if there are none."""
    together = steps_together(run)
    if not together:
        return None
    steady = [step for step in together if step.number >= together[0].number + NUM_FIRST] or together
    usual_s = median(step.lasted_s for step in steady)
    calm = [step for step in steady if step.lasted_s <= _SPIKE * usual_s] or steady
    by_rank = {rank: _mean([step.parts(rank) for step in calm]) for rank in calm[0].ranks}
    lasted = sorted(step.lasted_s for step in steady)
    trained_s = sum(step.lasted_s for step in calm)
    num_ranks = len(by_rank)
    return Figures(
        num_steps=len(calm),
        step_s=median(lasted),
        slow_step_s=lasted[min(len(lasted) - 1, math.floor(0.95 * len(lasted)))],
        samples_per_s=sum(step.samples for step in calm) / trained_s if trained_s else 0.0,
        tokens_per_s=_rate([step.counts for step in calm], trained_s),
        total_s=_span(run),
        paused_s=_paused(run.events),
        by_rank=by_rank,
        critical=_mean([step.parts(step.last_rank) for step in calm]),
        last_share={rank: sum(step.last_rank == rank for step in calm) / len(calm) for rank in by_rank},
        knows_waits=calm[0].knows_waits,
        straggler=find_slow_rank(calm) if num_ranks > 1 and calm[0].knows_waits and len(calm) > 1 else None,
    )


def _rate(counts: Sequence[float | None], seconds: float) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / seconds if known and len(known) == len(counts) and seconds else None


def _mean(parts: Sequence[Parts]) -> Parts:
    return Parts(**{name: fmean(getattr(each, name) for each in parts) for name in PARTS})


def _span(run: Recorded) -> float:
    begins = [record.steps[0].time for record in run.ranks.values() if record.steps]
    ends = [record.steps[-1].time + record.steps[-1].total_s for record in run.ranks.values() if record.steps]
    return max(ends) - min(begins)


def _paused(events: Sequence[Event]) -> dict[str, float]:
    paused: dict[str, float] = {}
    for event in events:
        if event.seconds and event.event in ("checkpoint", "evaluation"):
            paused[event.event] = paused.get(event.event, 0.0) + event.seconds
    return paused
