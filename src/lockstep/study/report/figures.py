"""What a record says in numbers: pure functions from the ranks' steps to where the time goes.

[Note: the rank that all wait for]
All ranks leave the reduction of a step together. The one that came last has waited for the wire only: its wait is the
*wire* time of the step, what another rank waited longer is waiting for *peers*, and the last one's own work is what the
step took time for. Summed over the steps, each with its own last rank, that is the *critical path*. No clocks are
compared for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lockstep.study.report.lines import Event, Step
from lockstep.study.report.read import Recorded
from lockstep.telemetry.stragglers import StepTimes, Straggler, find_stragglers, pace_of

NUM_FIRST = 5
"""The first steps allocate, compile and find out in which order gradients come; they are left out of the means."""

_SPIKE = 3.0

PARTS = ("data_wait_s", "forward_s", "backward_s", "wire_s", "peers_s", "optimizer_s", "other_s")


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by what they went into; ``wire_s`` and ``peers_s`` are 0 where they are not known."""

    data_wait_s: float
    forward_s: float
    backward_s: float
    wire_s: float
    peers_s: float
    optimizer_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """Return all by name, in the order of `PARTS`."""
        return {name: getattr(self, name) for name in PARTS}


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
        straggler=_straggler(calm) if num_ranks > 1 and calm[0].knows_waits and len(calm) > 1 else None,
    )


@dataclass(frozen=True)
class Together:
    """A line's step (or steps) on all ranks."""

    number: int
    ranks: Mapping[int, Step]

    @property
    def knows_waits(self) -> bool:
        """Whether every rank measured what it waited for communication."""
        return all(step.exposed_s is not None for step in self.ranks.values())

    @property
    def wire_s(self) -> float:
        """What the last rank waited."""
        return min(step.exposed_s or 0.0 for step in self.ranks.values()) if self.knows_waits else 0.0

    @property
    def last_rank(self) -> int:
        """The rank that all wait for: it waits least, or where that is not known works longest."""
        if self.knows_waits:
            return min(self.ranks, key=lambda rank: self.ranks[rank].exposed_s or 0.0)
        return max(self.ranks, key=lambda rank: self.ranks[rank].own_s)

    @property
    def samples(self) -> float:
        """Of the global batch."""
        return next(iter(self.ranks.values())).samples

    @property
    def counts(self) -> float | None:
        """What the loss counts in the global batch, if that is not samples."""
        return next((step.counts for step in self.ranks.values() if step.counts is not None), None)

    @property
    def lasted_s(self) -> float:
        """Seconds on the slowest rank."""
        return max(step.lasted_s for step in self.ranks.values())

    def parts(self, rank: int) -> Parts:
        """Return what the step of a rank is made of."""
        step = self.ranks[rank]
        exposed_s = (step.exposed_s or 0.0) if self.knows_waits else 0.0
        wire_s = min(self.wire_s, exposed_s)
        other_s = max(0.0, max(step.total_s, step.lasted_s) - step.own_s - exposed_s)  # between steps, too
        return Parts(
            data_wait_s=step.data_wait_s,
            forward_s=step.forward_s,
            backward_s=step.backward_s,
            wire_s=wire_s,
            peers_s=exposed_s - wire_s,
            optimizer_s=step.optimizer_s,
            other_s=other_s,
        )


def steps_together(run: Recorded) -> list[Together]:
    """Return the steps that all ranks have recorded, by number."""
    by_rank = {rank: {step.step: step for step in record.steps} for rank, record in run.ranks.items() if record.steps}
    if not by_rank:
        return []
    common = set.intersection(*(set(steps) for steps in by_rank.values()))
    return [Together(number, {rank: by_rank[rank][number] for rank in by_rank}) for number in sorted(common)]


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


def _straggler(steps: Sequence[Together]) -> Straggler | None:
    paces = {rank: pace_of([_times(step.ranks[rank]) for step in steps]) for rank in steps[0].ranks}
    return next(iter(find_stragglers(paces)), None)


def _times(step: Step) -> StepTimes:
    return StepTimes(
        loader=step.data_wait_s,
        forward=step.forward_s,
        backward=step.backward_s,
        optimizer=step.optimizer_s,
        waits=step.exposed_s or 0.0,
    )
