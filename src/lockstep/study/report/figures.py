"""The figures of a run: aligned steps, the slow rank, traffic, and the timeline of single steps; pure functions."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean, median, median_low

from lockstep.study.links import Computing, Link, Profile, ReadyBucket, cable_bytes, format_rate
from lockstep.study.report.run_reader import Recorded, Step, Timeline
from lockstep.telemetry.stragglers import PHASES, StepTimes, Straggler, find_stragglers, pace_of

# [Note: the rank that all wait for]
# All ranks leave the reduction of a step together. The one that came last has waited for the wire only: its wait is
# the *wire* time of the step, what another rank waited longer is waiting for *peers*, and the last one's own work is
# what the step took time for. Summed over the steps, each with its own last rank, that is the *critical path*. No
# clocks are compared for it.


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
        return float(sum(astuple(self)))

    @property
    def computing_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


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
    def last_rank(self) -> int:
        """The rank that all wait for: it waits least, or where that is not known works longest."""
        if self.knows_waits:
            return min(self.ranks, key=lambda rank: self.ranks[rank].exposed_s or 0.0)
        return max(self.ranks, key=lambda rank: self.ranks[rank].own_s)

    @property
    def lasted_s(self) -> float:
        """Seconds on the slowest rank."""
        return max(step.lasted_s for step in self.ranks.values())

    def parts(self, rank: int) -> Parts:
        """Return what the step of a rank is made of."""
        step = self.ranks[rank]
        waits_s = [each.exposed_s or 0.0 for each in self.ranks.values()]
        exposed_s, wire_s = (step.exposed_s or 0.0, min(waits_s)) if self.knows_waits else (0.0, 0.0)
        return Parts(
            data_wait_s=step.data_wait_s,
            forward_s=step.forward_s,
            backward_s=step.backward_s,
            wire_s=wire_s,
            peers_s=exposed_s - wire_s,
            optimizer_s=step.optimizer_s,
            other_s=max(0.0, max(step.total_s, step.lasted_s) - step.own_s - exposed_s),  # between steps, too
        )


def align_steps(run: Recorded) -> list[AlignedStep]:
    """Return the steps that all ranks have recorded, by number."""
    by_rank = {rank: {step.step: step for step in record.steps} for rank, record in run.ranks.items() if record.steps}
    common = set.intersection(*map(set, by_rank.values())) if by_rank else set()
    return [AlignedStep(number, {rank: by_rank[rank][number] for rank in by_rank}) for number in sorted(common)]


# A rank that keeps the others waiting in every step.

# In so many steps a slow rank comes last at least; in more of few, where chance does much.
_MOSTLY_LAST = 2 / 3

_MIN_STEPS = 20

# What it costs then, of a step; less may come from what disturbs them.
_MIN_SHARE = 0.15


def find_slow_rank(steps: Sequence[AlignedStep]) -> Straggler | None:
    """Return the rank that keeps the others waiting, or None.

    As long as nothing disturbs the ranks, a good step of such a rank takes longer than a bad one of the others. Where
    something does, on a busy machine, their steps are compared one by one: what slows all of them down drops out. A
    slow rank is then the one that comes last in most steps, if that costs the others a part of a step worth a word.
    """
    times = {rank: [_times(step.ranks[rank]) for step in steps] for rank in steps[0].ranks}
    clear = find_stragglers({rank: pace_of(of_rank) for rank, of_rank in times.items()})
    if clear:
        return clear[0]
    # Not by the medians of each rank, which a disturbance moves by more than the rank is slower.
    last_ranks = [step.last_rank for step in steps]
    slow = max(times, key=last_ranks.count)
    by_chance = 0.5 + 1.5 / math.sqrt(len(steps))  # three standard deviations above that of one of two alike
    if len(steps) < _MIN_STEPS or last_ranks.count(slow) < max(_MOSTLY_LAST, by_chance) * len(steps):
        return None

    def later_s(name: str) -> float:
        """Return by how much the rank is later than is usual among the others: the median over the steps."""
        others = [of_rank for rank, of_rank in times.items() if rank != slow]
        usual = [median_low(getattr(each, name) for each in at) for at in zip(*others, strict=True)]
        return float(median(getattr(mine, name) - other for mine, other in zip(times[slow], usual, strict=True)))

    lost_s, step_s = later_s("own_s"), median(step.lasted_s for step in steps)
    if lost_s < _MIN_SHARE * step_s:
        return None
    phase = max(PHASES, key=later_s)
    took_s = median(getattr(each, phase) for each in times[slow])
    return Straggler(slow, phase, lost_s, took_s, took_s - later_s(phase), step_s)


def _times(step: Step) -> StepTimes:
    return StepTimes(step.data_wait_s, step.forward_s, step.backward_s, step.optimizer_s, step.exposed_s or 0.0)


# Where the time goes, in numbers.

# The first steps allocate, compile and find out in which order gradients come; they are left out of the means.
NUM_FIRST = 5

_SPIKE = 3.0


@dataclass(frozen=True)
class Figures:
    """What a record amounts to in numbers.

    Args:
        num_steps: That the means are over.
        step_s: From the beginning of a step to that of the next: the median.
        slow_step_s: Of twenty steps, one takes longer than this.
        samples_per_s: Over all steps but the first and spikes.
        tokens_per_s: Likewise of what the loss counts; None if that is samples.
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
    tokens_per_s: float | None
    total_s: float
    paused_s: Mapping[str, float]
    by_rank: Mapping[int, Parts]
    critical: Parts
    last_share: Mapping[int, float]
    knows_waits: bool
    straggler: Straggler | None


def find_figures(run: Recorded) -> Figures | None:
    """Return the figures of the steps that all ranks have recorded; None if there are none."""
    steps = align_steps(run)
    if not steps:
        return None
    # Spikes (a checkpoint, a hiccup of the machine) would move the means by more than all that is to be seen in them.
    steady = [step for step in steps if step.number >= steps[0].number + NUM_FIRST] or steps
    lasted_s = sorted(step.lasted_s for step in steady)
    calm = [step for step in steady if step.lasted_s <= _SPIKE * median(lasted_s)] or steady
    last_ranks = [step.last_rank for step in calm]
    knows_waits = calm[0].knows_waits
    trained_s = sum(step.lasted_s for step in calm) or math.inf
    # Of the global batch, so that any rank has them; the counts may be known to some ranks only.
    samples = [next(iter(step.ranks.values())).samples for step in calm]
    counts = [next((each.counts for each in step.ranks.values() if each.counts is not None), None) for step in calm]
    records = [record.steps for record in run.ranks.values() if record.steps]
    paused_s: dict[str, float] = {}
    for event in run.events:
        if event.seconds and event.event in ("checkpoint", "evaluation"):
            paused_s[event.event] = paused_s.get(event.event, 0.0) + event.seconds
    return Figures(
        num_steps=len(calm),
        step_s=median(lasted_s),
        slow_step_s=lasted_s[min(len(lasted_s) - 1, math.floor(0.95 * len(lasted_s)))],
        samples_per_s=sum(samples) / trained_s,
        tokens_per_s=None if None in counts else sum(filter(None, counts)) / trained_s,
        total_s=max(of_rank[-1].time + of_rank[-1].total_s for of_rank in records)
        - min(of_rank[0].time for of_rank in records),
        paused_s=paused_s,
        by_rank={rank: _mean([step.parts(rank) for step in calm]) for rank in calm[0].ranks},
        critical=_mean([step.parts(step.last_rank) for step in calm]),
        last_share={rank: last_ranks.count(rank) / len(calm) for rank in calm[0].ranks},
        knows_waits=knows_waits,
        straggler=find_slow_rank(calm) if len(calm[0].ranks) > 1 and knows_waits and len(calm) > 1 else None,
    )


def _mean(parts: Sequence[Parts]) -> Parts:
    return Parts(**{each.name: fmean(getattr(one, each.name) for one in parts) for each in fields(Parts)})


# What the buckets of gradients took on their way.


@dataclass(frozen=True)
class Traffic:
    """The trips of all buckets: from when the last rank has sent one until it is reduced.

    Args:
        num_ranks: That exchanged them.
        sizes_bytes: Of a step's buckets by number, in the order in which they leave.
        times_s: By bucket, the seconds of its trips, the fastest first.
    """

    num_ranks: int
    sizes_bytes: Mapping[int, int]
    times_s: Mapping[int, list[float]]

    def bus_bytes_per_s(self, number: int) -> float:
        """Return a bucket's bus bandwidth at its median trip: 2 (n - 1) / n of its bytes over the time."""
        seconds = median(self.times_s[number])
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.sizes_bytes[number] / seconds if seconds else 0.0


def find_traffic(run: Recorded) -> Traffic | None:
    """Return what is known of the buckets' trips; None if they were not recorded."""
    by_rank = [{each.step: each for each in record.timelines} for record in run.ranks.values()]
    trips = defaultdict[tuple[int, int], list[float]](list)
    last: dict[int, int] = {}
    for step in sorted(set.intersection(*map(set, by_rank))) if len(by_rank) > 1 else []:
        rows = [{bucket.number: bucket for bucket in of_rank[step].buckets} for of_rank in by_rank]
        sizes = {number: rows[0][number].size_bytes for number in sorted(set.intersection(*map(set, rows)))}
        last = sizes or last
        for number, size in sizes.items():
            # What a rank's bucket takes from being sent until reduced is waiting for peers and the wire; the shortest
            # is the wire alone, as in [Note: the rank that all wait for].
            trips[number, size].append(min(max(0.0, row[number].done_s - row[number].sent_s) for row in rows))
    # DDP builds its buckets anew after the first step, in the order in which gradients came: only the last ones count.
    times_s = {number: sorted(trips[number, size]) for number, size in last.items()}
    return Traffic(len(run.ranks), last, times_s) if last else None


# The network between machines, as far as the record shows it.


@dataclass(frozen=True)
class Network:
    """What crosses the links between the machines of a run.

    Args:
        num_machines: That took part.
        profile: What one rank takes for a step, and its buckets.
        link: What the links gave the run; None if there is none.
        slowest: Which link was the slowest, by its two ends; empty if that is not known.
    """

    num_machines: int
    profile: Profile
    link: Link | None
    slowest: str = ""

    @property
    def sent_bytes(self) -> float:
        """What each machine sends in a step without compression."""
        return cable_bytes(self.profile.gradient_bytes, self.num_machines)


def num_machines(run: Recorded) -> int:
    """Return how many machines took part; containers may all have the same host name."""
    ranks = [each for each in run.last.get("ranks") or () if isinstance(each, dict) and each]
    return len({(each.get("host"), each.get("node")) for each in ranks}) or 1


def find_network(run: Recorded, figures: Figures) -> Network | None:
    """Return what is known of the exchange of gradients; None unless steps have timelines with buckets."""
    machines, num_ranks = num_machines(run), len(run.ranks)
    batch = run.last.get("global_batch_size")
    timelines = [each for each in run.zero.timelines if each.buckets and each.waited]
    if not timelines or type(batch) is not int or machines < 1:
        return None
    last, parts = timelines[-1], figures.critical
    begin_s = max((begin for phase, begin, _ in last.spans if phase == "backward"), default=0.0)
    own_s = max(last.waited[0] - begin_s if last.waited else 0.0, 1e-9)
    order = sorted(last.buckets, key=lambda bucket: bucket.sent_s)
    ready = [min(1.0, max(0.0, (bucket.ready_s - begin_s) / own_s)) for bucket in order[:-1]]
    buckets = [ReadyBucket(each.size_bytes, at) for each, at in zip(order, [*ready, 1.0], strict=True)]
    alone = Computing(parts.data_wait_s + parts.forward_s, parts.backward_s, parts.optimizer_s + parts.other_s)
    profile = Profile(batch, {-(-batch // num_ranks): alone}, buckets, ranks_per_machine=-(-num_ranks // machines))
    rates = [rate for each in timelines if (rate := _link_rate(each, run, machines))]
    link = None
    if machines > 1 and rates:
        link = Link(median(rates), source=f"{format_rate(median(rates))} as recorded")
    return Network(machines, profile, link, _slowest_link(run))


def _link_rate(timeline: Timeline, run: Recorded, machines: int) -> float | None:
    """Return the bytes per second that a machine sent while buckets were on their way; None if that is not known."""
    settings = run.settings
    ratio = {None: 1.0, "bf16": 0.5, "fp16": 0.5}.get(settings.get("compression") or settings.get("wire"))
    if ratio is None or machines < 2:
        return None  # what the other ways of compression send depends on the model
    members = machines if run.last.get("backend") == "shm+gloo" else len(run.ranks)
    buckets = timeline.buckets
    # All of them together, which keep the link busy if it is slow; or the largest, if it is fast and often idle.
    largest = max(buckets, key=lambda each: each.size_bytes)
    spans = [(largest.size_bytes, largest.done_s - largest.sent_s)]
    whole_s = max(each.done_s for each in buckets) - min(each.sent_s for each in buckets)
    spans.append((sum(each.size_bytes for each in buckets), whole_s))
    return max((ratio * cable_bytes(size, members) / seconds for size, seconds in spans if seconds > 0), default=None)


def _slowest_link(run: Recorded) -> str:
    rates = [
        (line.figures["link_bytes_per_s"], f"{record.host} (rank {rank}) to {line.link_peer}")
        for rank, record in run.ranks.items()
        for line in record.machine
        if line.figures.get("link_bytes_per_s")
    ]
    by_link: dict[str, list[float]] = {}
    for rate, name in rates:
        by_link.setdefault(name, []).append(rate)
    if not by_link:
        return ""
    slowest = min(by_link, key=lambda name: median(by_link[name]))
    return f"{slowest}, {median(by_link[slowest]) / 1e6:.3g} MB/s"


# A few steps with all ranks on one clock.

MOST_STEPS = 3


def find_window(run: Recorded) -> dict[int, list[Timeline]]:
    """Return by rank the timelines of some steps that follow each other, of typical length; empty if there are none."""
    by_rank = {rank: {each.step: each for each in record.timelines} for rank, record in run.ranks.items()}
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    # Where those that follow each other begin; the first steps are still finding their way.
    begins = [step for step in common if step - 1 not in common]
    if not begins:
        return {}
    later = sorted(begins[1:] or begins, key=lambda step: max(of_rank[step].end_s for of_rank in by_rank.values()))
    begin = later[len(later) // 2]
    steps = list(itertools.takewhile(common.__contains__, range(begin, begin + MOST_STEPS)))
    return {rank: [of_rank[step] for step in steps] for rank, of_rank in sorted(by_rank.items())}


def bars_of(timeline: Timeline, zero: float) -> list[tuple[str, float, float]]:
    """Return what a rank did in a step: phase, begin and end, in seconds after the time ``zero``.

    ``waiting`` is waiting for gradients, within backward.
    """
    found: list[tuple[str, float, float]] = []
    for phase, begin_s, end_s in timeline.spans:
        if phase == "backward" and timeline.waited is not None and begin_s <= timeline.waited[0] <= end_s:
            since_s, until_s = timeline.waited
            found += [(phase, begin_s, since_s), ("waiting", since_s, min(until_s, end_s))]
        else:
            found.append(("waiting" if phase == "communication" else phase, begin_s, end_s))
    shift_s = timeline.time - zero
    return [(phase, shift_s + begin_s, shift_s + end_s) for phase, begin_s, end_s in found]
