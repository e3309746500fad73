"""The figures of a run: aligned steps, the slow rank, traffic, and the timeline of single steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

from lockstep.study.report.run_reader import Event, Recorded, Step, Timeline
from lockstep.telemetry.stragglers import PHASES, StepTimes, Straggler, find_stragglers, pace_of

# The same step on all ranks, and what each of them spent its time on.
#
# [Note: the rank that all wait for]
# All ranks leave the reduction of a step together. The one that came last has waited for the wire only: its wait is
# the *wire* time of the step, what another rank waited longer is waiting for *peers*, and the last one's own work is
# what the step took time for. Summed over the steps, each with its own last rank, that is the *critical path*. No
# clocks are compared for it.

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
class AlignedStep:
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


def align_steps(run: Recorded) -> list[AlignedStep]:
    """Return the steps that all ranks have recorded, by number."""
    by_rank = {rank: {step.step: step for step in record.steps} for rank, record in run.ranks.items() if record.steps}
    if not by_rank:
        return []
    common = set.intersection(*(set(steps) for steps in by_rank.values()))
    return [AlignedStep(number, {rank: by_rank[rank][number] for rank in by_rank}) for number in sorted(common)]


# A rank that keeps the others waiting in every step: pure functions of the steps of all ranks.

_MOSTLY_LAST = 2 / 3
"""In so many steps a slow rank comes last at least; in more of few, where chance does much."""

_MIN_STEPS = 20
_MIN_SHARE = 0.15
"""What it costs then, of a step; less may come from what disturbs them."""


def find_slow_rank(steps: Sequence[AlignedStep]) -> Straggler | None:
    """Return the rank that keeps the others waiting, or None.

    As long as nothing disturbs the ranks, a good step of such a rank takes longer than a bad one of the others. Where
    something does, on a busy machine, their steps are compared one by one: what slows all of them down drops out.
    """
    paces = {rank: pace_of([_times(step.ranks[rank]) for step in steps]) for rank in steps[0].ranks}
    return next(iter(find_stragglers(paces)), None) or _mostly_last(steps)


def _mostly_last(steps: Sequence[AlignedStep]) -> Straggler | None:
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


# What a record says in numbers: pure functions from the ranks' steps to where the time goes.

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
    together = align_steps(run)
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


# What the buckets of gradients took on their way: pure functions of the timelines of all ranks.


@dataclass(frozen=True)
class Trip:
    """A bucket in one step: its bytes, and the seconds from when the last rank had sent it until it was reduced."""

    step: int
    number: int
    size_bytes: int
    wire_s: float


@dataclass(frozen=True)
class Traffic:
    """The trips of all buckets.

    Args:
        trips: In the order of the steps; of buckets as they were last, not of those that were built anew since.
        num_buckets: Of a step, as they were last.
        sizes_bytes: Theirs, in the order in which they leave.
        median_s: Of a trip.
        slowest: The trip that took longest.
        best_s: By bucket, its fastest trip: what the link is able to do.
        bus_bytes_per_s: At the median, of the largest bucket: 2 (n - 1) / n of its bytes over its time.
    """

    trips: tuple[Trip, ...]
    num_buckets: int
    sizes_bytes: tuple[int, ...]
    median_s: float
    slowest: Trip
    best_s: Mapping[int, float]
    bus_bytes_per_s: float

    @property
    def total_bytes(self) -> int:
        """Of all buckets of a step."""
        return sum(self.sizes_bytes)


def find_traffic(run: Recorded) -> Traffic | None:
    """Return what is known of the buckets' trips; None if they were not recorded."""
    by_step: dict[int, dict[int, Timeline]] = {}
    for rank, record in run.ranks.items():
        for timeline in record.timelines:
            by_step.setdefault(timeline.step, {})[rank] = timeline
    # What a rank's bucket takes from being sent until reduced is waiting for peers and the wire; the shortest is the
    # wire alone, as in [Note: the rank that all wait for].
    trips = []
    for step in sorted(by_step):
        ranks = by_step[step]
        if len(ranks) < len(run.ranks) or len(ranks) < 2:
            continue
        rows = [{bucket.number: bucket for bucket in timeline.buckets} for timeline in ranks.values()]
        for number in sorted(set.intersection(*(set(row) for row in rows))):
            wire_s = min(max(0.0, row[number].done_s - row[number].sent_s) for row in rows)
            trips.append(Trip(step, number, rows[0][number].size_bytes, wire_s))
    if not trips:
        return None
    last = [trip for trip in trips if trip.step == trips[-1].step]
    as_last = {(trip.number, trip.size_bytes) for trip in last}
    trips = [trip for trip in trips if (trip.number, trip.size_bytes) in as_last]
    sizes = tuple(trip.size_bytes for trip in last)
    largest = max(sizes)
    typical_s = median(trip.wire_s for trip in trips if trip.size_bytes == largest)
    num_ranks = len(run.ranks)
    best: dict[int, float] = {}
    for trip in trips:
        best[trip.number] = min(trip.wire_s, best.get(trip.number, trip.wire_s))
    return Traffic(
        trips=tuple(trips),
        num_buckets=len(last),
        sizes_bytes=sizes,
        median_s=median(trip.wire_s for trip in trips),
        slowest=max(trips, key=lambda trip: trip.wire_s),
        best_s=best,
        bus_bytes_per_s=2 * (num_ranks - 1) / num_ranks * largest / typical_s if typical_s > 0 else 0.0,
    )


# A few steps with all ranks on one clock, and the critical path through them: pure functions.

MOST_STEPS = 3


@dataclass(frozen=True)
class Bar:
    """What a rank did from when to when; seconds after the beginning of the window."""

    rank: int
    step: int
    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class BucketBar:
    """A bucket of a rank: when it was ready, left, and was reduced; seconds after the beginning of the window."""

    rank: int
    step: int
    number: int
    size_bytes: int
    ready_s: float
    sent_s: float
    done_s: float


@dataclass(frozen=True)
class Window:
    """Some steps that follow each other.

    Args:
        steps: Their numbers.
        bars: What the ranks did. ``waiting`` is waiting for gradients, within backward.
        buckets: Where they were recorded.
        critical: The bars that the steps could not have been shorter without.
        end_s: When the last rank was done.
    """

    steps: tuple[int, ...]
    bars: tuple[Bar, ...]
    buckets: tuple[BucketBar, ...]
    critical: tuple[Bar, ...]
    end_s: float


def find_window(run: Recorded) -> Window | None:
    """Return a window of typical length; None if no step has a timeline of every rank."""
    by_rank = {rank: {each.step: each for each in record.timelines} for rank, record in run.ranks.items()}
    if not by_rank or not all(by_rank.values()):
        return None
    common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    groups = _groups(common)
    if not groups:
        return None
    lengths = {
        group[0]: sum(max(by_rank[rank][step].end_s for rank in by_rank) for step in group) / len(group)
        for group in groups
    }
    later = groups[1:] or groups  # the first steps are still finding their way
    typical = sorted(later, key=lambda group: (lengths[group[0]], group[0]))[len(later) // 2]
    return make_window([{rank: by_rank[rank][step] for rank in by_rank} for step in typical[:MOST_STEPS]])


def make_window(steps: Sequence[dict[int, Timeline]]) -> Window:
    """Return the timelines of some steps, by rank, as one window."""
    zero = min(timeline.time for timelines in steps for timeline in timelines.values())
    bars: list[Bar] = []
    buckets: list[BucketBar] = []
    critical: list[Bar] = []
    for timelines in steps:
        own = {rank: _bars(rank, timeline, timeline.time - zero) for rank, timeline in timelines.items()}
        for rank, timeline in timelines.items():
            begin_s = timeline.time - zero
            bars += own[rank]
            buckets += [
                BucketBar(
                    rank,
                    timeline.step,
                    each.number,
                    each.size_bytes,
                    begin_s + each.ready_s,
                    begin_s + each.sent_s,
                    begin_s + each.done_s,
                )
                for each in timeline.buckets
            ]
        critical += own[_last_rank(timelines)]
    end_s = max((bar.end_s for bar in bars), default=0.0)
    numbers = tuple(next(iter(timelines.values())).step for timelines in steps)
    return Window(numbers, tuple(bars), tuple(buckets), tuple(critical), end_s)


def _groups(steps: Sequence[int]) -> list[list[int]]:
    """Return runs of numbers that follow each other."""
    groups: list[list[int]] = []
    for step in steps:
        if groups and groups[-1][-1] == step - 1:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _last_rank(timelines: dict[int, Timeline]) -> int:
    """Return the rank that all wait for: it waits least; without such figures, the one that is done last."""
    waits = {rank: each.waited[1] - each.waited[0] for rank, each in timelines.items() if each.waited is not None}
    if len(waits) == len(timelines):
        return min(waits, key=lambda rank: waits[rank])
    return max(timelines, key=lambda rank: timelines[rank].time + timelines[rank].end_s)


def _bars(rank: int, timeline: Timeline, shift_s: float) -> list[Bar]:
    found = []
    for phase, begin_s, end_s in timeline.spans:
        if phase == "communication":
            found.append(Bar(rank, timeline.step, "waiting", shift_s + begin_s, shift_s + end_s))
            continue
        if phase == "backward" and timeline.waited is not None and begin_s <= timeline.waited[0] <= end_s:
            until_s = min(timeline.waited[1], end_s)
            found.append(Bar(rank, timeline.step, phase, shift_s + begin_s, shift_s + timeline.waited[0]))
            found.append(Bar(rank, timeline.step, "waiting", shift_s + timeline.waited[0], shift_s + until_s))
            continue
        found.append(Bar(rank, timeline.step, phase, shift_s + begin_s, shift_s + end_s))
    return found
