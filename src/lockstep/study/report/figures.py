"""The figures of a run: aligned steps, the slow rank, network, costs, and timelines; pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean, median, median_low
from typing import NamedTuple

from lockstep.study.links import Computing, Link, Profile, ReadyBucket, cable_bytes, format_rate
from lockstep.telemetry.cost import Price, Usage
from lockstep.telemetry.record import RankRecord, Recorded, StepLine, Timeline
from lockstep.telemetry.step_times import OWN_PARTS, StepTimes
from lockstep.telemetry.stragglers import Straggler, find_stragglers, pace_of

# [Note: the rank that all wait for]
# All ranks leave the reduction of a step together. The last rank has waited only for the transfer: its wait is the
# *wire* time of the step. The additional wait of another rank is waiting for *peers*. The own work of the last rank
# determines the time of the step. Its sum over the steps, each with its own last rank, is the *critical path*. Clocks
# are not compared.


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part; ``wire_s`` and ``peers_s`` are 0 if unknown."""

    data_wait_s: float
    forward_s: float
    backward_s: float
    wire_s: float
    peers_s: float
    optimizer_s: float
    other_s: float
    core_wait_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return float(sum(astuple(self)))

    @property
    def computing_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def is_starved(self) -> bool:
        """Whether waiting for a core is the largest part."""
        return self.core_wait_s > 0 and self.core_wait_s >= max(astuple(self))


@dataclass(frozen=True)
class AlignedStep:
    """The step (or steps) of a line on all ranks."""

    number: int
    ranks: Mapping[int, StepLine]

    @property
    def knows_waits(self) -> bool:
        """Whether every rank measured its waiting for communication."""
        return all(step.times.exposed_s is not None for step in self.ranks.values())

    @property
    def last_rank(self) -> int:
        """The rank that all wait for: it waits least, or, if waiting is unknown, works longest."""
        if self.knows_waits:
            return min(self.ranks, key=lambda rank: self.ranks[rank].times.exposed_s or 0.0)
        return max(self.ranks, key=lambda rank: self.ranks[rank].times.own_s)

    @property
    def lasted_s(self) -> float:
        """Seconds on the slowest rank."""
        return max(step.lasted_s for step in self.ranks.values())

    def parts(self, rank: int) -> Parts:
        """Return the parts of the step of a rank."""
        line = self.ranks[rank]
        step = line.times.lasting(line.lasted_s)
        waits_s = [each.times.exposed_s or 0.0 for each in self.ranks.values()]
        wire_s = min(waits_s) if self.knows_waits else 0.0
        peers_s = (step.exposed_s or 0.0) - wire_s if self.knows_waits else 0.0
        return Parts(
            data_wait_s=step.part("data_wait"),
            forward_s=step.part("forward"),
            backward_s=step.part("backward"),
            wire_s=wire_s,
            peers_s=peers_s,
            optimizer_s=step.part("optimizer"),
            other_s=step.other_s,
            core_wait_s=step.part("core_wait"),
        )


def align_steps(run: Recorded) -> list[AlignedStep]:
    """Return the steps that all ranks have recorded, by number."""
    by_rank = {rank: {step.step: step for step in record.steps} for rank, record in run.ranks.items() if record.steps}
    common = set.intersection(*map(set, by_rank.values())) if by_rank else set()
    return [AlignedStep(number, {rank: by_rank[rank][number] for rank in by_rank}) for number in sorted(common)]


# A rank that keeps the others waiting in every step.

# A slow rank comes last in at least this share of the steps; in a larger share of few steps.
_MOSTLY_LAST = 2 / 3

_MIN_STEPS = 20

# The share of a step that it costs at least; less may be noise.
_MIN_SHARE = 0.15


def find_slow_rank(steps: Sequence[AlignedStep]) -> Straggler | None:
    """Return the rank that keeps the others waiting, or None.

    Usually, fast steps of such a rank take longer than slow steps of the others. On a busy machine, single steps are
    compared instead, so that disturbances of all ranks cancel: the slow rank is the one that comes last in most steps,
    if that costs a considerable part of a step.
    """
    times = {
        rank: [step.ranks[rank].times.lasting(step.ranks[rank].lasted_s) for step in steps] for rank in steps[0].ranks
    }
    clear = find_stragglers({rank: pace_of(of_rank) for rank, of_rank in times.items()})
    if clear:
        return clear[0]
    # Medians of each rank would not do, as the noise may be larger than the difference.
    last_ranks = [step.last_rank for step in steps]
    slow = max(times, key=last_ranks.count)
    by_chance = 0.5 + 1.5 / math.sqrt(len(steps))  # three standard deviations above that of two equal ranks
    if len(steps) < _MIN_STEPS or last_ranks.count(slow) < max(_MOSTLY_LAST, by_chance) * len(steps):
        return None

    def later_s(time_of: Callable[[StepTimes], float]) -> float:
        """Return by how much the rank is slower than the others: the median over the steps."""
        others = [of_rank for rank, of_rank in times.items() if rank != slow]
        usual = [median_low(time_of(each) for each in at) for at in zip(*others, strict=True)]
        return float(median(time_of(mine) - other for mine, other in zip(times[slow], usual, strict=True)))

    lost_s, step_s = later_s(lambda each: each.own_s), median(step.lasted_s for step in steps)
    if lost_s < _MIN_SHARE * step_s:
        return None
    by_phase = {part: later_s(lambda each, part=part: each.part(part)) for part in OWN_PARTS}  # type: ignore[misc]
    phase = max(by_phase, key=by_phase.__getitem__)
    took_s = median(each.part(phase) for each in times[slow])
    return Straggler(slow, phase, lost_s, took_s, took_s - by_phase[phase], step_s)


# The figures.

# The first steps allocate, compile and find the order of gradients; the means do not include them.
NUM_FIRST = 5

_SPIKE = 3.0


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Args:
        num_steps: The number of steps in the means.
        step_s: From the beginning of a step to that of the next: the median.
        slow_step_s: One step in twenty takes longer than this.
        samples_per_s: Over all steps except the first ones and spikes.
        tokens_per_s: The same for what the loss counts; None if that is samples.
        total_s: From the beginning of the first step to the end of the last.
        paused_s: The pauses of training for checkpoints and evaluations, by event.
        by_rank: Means over the steps without spikes.
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
    # Without spikes, such as a checkpoint, which would dominate the means.
    steady = [step for step in steps if step.number >= steps[0].number + NUM_FIRST] or steps
    lasted_s = sorted(step.lasted_s for step in steady)
    calm = [step for step in steady if step.lasted_s <= _SPIKE * median(lasted_s)] or steady
    last_ranks = [step.last_rank for step in calm]
    knows_waits = calm[0].knows_waits
    trained_s = sum(step.lasted_s for step in calm) or math.inf
    # Those of the global batch, which every rank has; some ranks may not have the counts.
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
        total_s=max(of_rank[-1].time + of_rank[-1].times.total_s for of_rank in records)
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


# The network between machines.


@dataclass(frozen=True)
class Network:
    """The traffic between the machines of a run.

    Args:
        num_machines: The number of machines.
        profile: The times of a step of one rank, and its buckets.
        link: The rate of the links in the run; None for one machine.
        slowest: The two ends of the slowest link; empty if unknown.
    """

    num_machines: int
    profile: Profile
    link: Link | None
    slowest: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that each machine sends in a step without compression."""
        return cable_bytes(self.profile.gradient_bytes, self.num_machines)


def num_machines(run: Recorded) -> int:
    """Return the number of machines; containers may have equal host names."""
    ranks = [each for each in run.last.get("ranks") or () if isinstance(each, dict) and each]
    return len({(each.get("host"), each.get("node")) for each in ranks}) or 1


def find_network(run: Recorded, figures: Figures) -> Network | None:
    """Return the traffic of a run; None unless steps have timelines with buckets."""
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
    rest_s = parts.optimizer_s + parts.other_s + parts.core_wait_s
    alone = Computing(parts.data_wait_s + parts.forward_s, parts.backward_s, rest_s)
    profile = Profile(batch, {-(-batch // num_ranks): alone}, buckets, ranks_per_machine=-(-num_ranks // machines))
    rates = [rate for each in timelines if (rate := _link_rate(each, run, machines))]
    link = None
    if machines > 1 and rates:
        link = Link(median(rates), source=f"{format_rate(median(rates))} as recorded")
    return Network(machines, profile, link, _slowest_link(run))


def _link_rate(timeline: Timeline, run: Recorded, machines: int) -> float | None:
    """Return the bytes per second that a machine sent while buckets were exchanged; None if unknown."""
    settings = run.settings
    ratio = {None: 1.0, "bf16": 0.5, "fp16": 0.5}.get(settings.get("compression"))
    if ratio is None or machines < 2:
        return None  # with other compression, the bytes depend on the model
    members = machines if run.last.get("backend") == "shm+gloo" else len(run.ranks)
    buckets = timeline.buckets
    # All buckets together, which keep a slow link busy; or the largest bucket, as a fast link is often idle.
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


# Costs: of the run, of an epoch, and until a loss.

# Number of steps in the mean of the training loss, as a single batch may have a low loss by chance.
NUM_LOSSES = 10


def find_costs(run: Recorded, price: str | None, until_loss: float | None) -> list[str]:
    """Return sentences on what all starts of the run used; empty if that was not recorded.

    Args:
        run: The run.
        price: Of a device for an hour; by default that of the record.
        until_loss: Also return the use until this loss.

    Raises:
        ConfigurationError: The price cannot be read.
    """
    recorded, whole, steps = run.settings.get("price"), _usage(run), run.zero.steps
    cost = Price.read(price if price is not None or recorded is None else str(recorded))
    if not whole.device_s:
        return []
    found = [f"The run (starts: {len(run.sessions)}) used {whole.text(cost)}."]
    if steps and isinstance(per_epoch := run.last.get("steps_per_epoch"), int):
        found.append(f"An epoch used {(whole * (per_epoch / (steps[-1].step + steps[-1].num_steps))).text(cost)}.")
    if until_loss is not None:
        name, losses = _losses(run)
        reached = next(((end, step) for end, loss, step in losses if loss <= until_loss), None)
        was = f"was {until_loss:g} or less"
        if reached is None:
            return [*found, f"The {name} never {was}."]
        found.append(f"Until the {name} {was}, after step {reached[1]}, it used {_usage(run, reached[0]).text(cost)}.")
    return found


def _usage(run: Recorded, until: float = math.inf) -> Usage:
    """Return the use until a time on rank zero's clock; of a killed start, up to its last line."""
    total = Usage()
    for line in run.machine:
        if device_s := line.figures.get("device_s"):
            # A line covers the time since the line before, in which the loss may have been reached.
            share = 1 + min(0.0, until - line.time) * line.figures.get("num_devices", 1.0) / device_s
            if share > 0:
                total += Usage(device_s, line.figures.get("energy_j", math.nan)) * share
    return total


def _losses(run: Recorded) -> tuple[str, list[tuple[float, float, int]]]:
    """Return the name of the loss; and for each value the time, the loss, and the number of steps done."""
    ends = [(event.time + (event.seconds or 0.0), event.loss, event.step) for event in run.events]
    if evaluated := [(end, loss, step) for end, loss, step in ends if loss is not None]:
        return "evaluated loss", evaluated
    known = [step for step in run.zero.steps if step.loss is not None]
    windows = [known[at - NUM_LOSSES : at] for at in range(NUM_LOSSES, len(known) + 1)]
    return f"training loss (mean of {NUM_LOSSES} steps)", [
        (
            each[-1].time + each[-1].times.total_s,
            fmean(step.loss or 0.0 for step in each),
            each[-1].step + each[-1].num_steps,
        )
        for each in windows
    ]


# The use of the cores of the machine on which ranks waited most, mean over the run.


class Cores(NamedTuple):
    """The cores available to a process (0 if unknown), and those used by the ranks, other programs and the hypervisor.

    ``throttled`` is the number of cores withheld by a quota.
    """

    total: float
    ranks: float
    others: float
    stolen: float
    throttled: float


def find_cores(run: Recorded) -> Cores | None:
    """Return the use of the cores; None if it was not recorded."""

    def mean(record: RankRecord, name: str) -> float:
        # Without the first line, which is before any step.
        return fmean([line.figures.get(name, 0.0) for line in record.machine[1:]] or [0.0]) / 100

    waiting = max(run.ranks.values(), key=lambda record: mean(record, "core_wait_percent"), default=run.zero)
    busy, stolen, throttled = (mean(waiting, f"{name}_percent") for name in ("host_cpu", "steal", "throttled"))
    if not busy:
        return None
    beside = [record for record in run.ranks.values() if record.host == waiting.host]
    ranks = sum(mean(each, "cpu_percent") + mean(each, "workers_cpu_percent") for each in beside)
    total = str(((run.last.get("provenance") or {}).get("machine") or {}).get("cores"))
    return Cores(float(total) if total.isdecimal() else 0.0, ranks, max(0.0, busy - ranks), stolen, throttled)


# Timelines of all ranks on one clock.

MOST_STEPS = 3


def find_window(run: Recorded) -> dict[int, list[Timeline]]:
    """Return by rank the timelines of some consecutive steps of typical length; empty if there are none."""
    by_rank = {rank: {each.step: each for each in record.timelines} for rank, record in run.ranks.items()}
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    # The beginnings of consecutive steps; the first ones are not typical.
    begins = [step for step in common if step - 1 not in common]
    if not begins:
        return {}
    later = sorted(begins[1:] or begins, key=lambda step: max(of_rank[step].end_s for of_rank in by_rank.values()))
    begin = later[len(later) // 2]
    steps = list(itertools.takewhile(common.__contains__, range(begin, begin + MOST_STEPS)))
    return {rank: [of_rank[step] for step in steps] for rank, of_rank in sorted(by_rank.items())}


def bars_of(timeline: Timeline, zero: float) -> list[tuple[str, float, float]]:
    """Return the phases of a rank in a step: name, begin and end, in seconds after the time ``zero``.

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
