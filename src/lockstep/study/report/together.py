"""The same step on all ranks, and what each of them spent its time on.

[Note: the rank that all wait for]
All ranks leave the reduction of a step together. The one that came last has waited for the wire only: its wait is the
*wire* time of the step, what another rank waited longer is waiting for *peers*, and the last one's own work is what the
step took time for. Summed over the steps, each with its own last rank, that is the *critical path*. No clocks are
compared for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.study.report.lines import Step
from lockstep.study.report.read import Recorded

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
