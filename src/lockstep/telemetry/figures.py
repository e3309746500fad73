"""What is derived from the times of steps: metrics and snapshots of a run, slow ranks, figures of a record. Pure.

[Note: the rank that all wait for]
All ranks leave the reduction of a step at the same time, so the time between two reductions is the same for all. A
rank's *own work* in a step ends when its last bucket is ready, before the collective of that bucket starts. After that,
it waits for the gradients. The last rank waits only for the transfer, so the shortest wait of all ranks is the *wire*
time of the step, and the additional wait of another rank is waiting for its *peers*. The own work of the last rank
determines the time of the step. Its sum over the steps, each with its own last rank, is the *critical path*. Clocks of
different machines are not compared.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from statistics import fmean, median, median_low
from typing import Any, NamedTuple

from lockstep.telemetry.record import Recorded, StepLine
from lockstep.telemetry.step_times import OWN_PARTS, PARTS, StepTimes, combine, milliseconds

# --- metrics: what displays and sinks show of a run -------------------------------------------------------------------

_UNUSUAL = re.compile(r"[^\w.-]", re.ASCII)


@dataclass(frozen=True)
class Metric:
    """A value that sinks get. Dashboards depend on the names, which are listed in docs/reference/metrics.md.

    Attributes:
        name: Ends in the unit, such as ``train/loss`` or ``rank/step_s``. A part in braces stands for several metrics,
            such as ``eval/{metric}``.
        prometheus: The name in Prometheus, with base units, and ``_total`` for counters. The part in braces of ``name``
            is a label there, and so is the rank.
        meaning: In words.
        read: Returns the value of a `Snapshot` or a `RankFigures`; None if unknown.
        scale: Factor from our unit to that of Prometheus.
    """

    name: str
    prometheus: str
    meaning: str
    read: Callable[[Any], float | None] = lambda _: None
    scale: float = 1.0

    def name_of(self, member: str | int) -> str:
        """Return the name for what is in braces; characters that a sink does not accept become underscores."""
        return re.sub(r"\{\w+\}", _UNUSUAL.sub("_", str(member)), self.name)


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The last report of a rank.

    Attributes:
        host: Its machine.
        device: Its device, such as ``cuda:0``.
        step: Number of steps done.
        num_steps: Number of steps in the means; 0 while it evaluates, saves or starts.
        link_peer: The address of the other machine of ``link_bytes_per_s``.
        values: By their names in `RANK_METRICS`, without ``rank/``; unknown ones may be missing or None. Times are
            means over the steps since the report before.
    """

    rank: int
    host: str | None = None
    device: str | None = None
    step: int = 0
    num_steps: int = 0
    link_peer: str | None = None
    values: Mapping[str, float | None] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float | None:
        return self.values.get(name)


def with_waits(ranks: Iterable[RankFigures]) -> tuple[RankFigures, ...]:
    """Return ``ranks`` with what follows from the waits of all; see [Note: the rank that all wait for]."""
    ranks = tuple(ranks)
    # Ranks whose engine does not measure the waiting have none of it.
    waits_s = {figures.rank: wait_s for figures in ranks if (wait_s := figures["exposed_s"]) is not None}
    wire_s = min(waits_s.values(), default=0.0)
    splits = {rank: {"wire_s": wire_s, "peers_s": wait_s - wire_s} for rank, wait_s in waits_s.items()}
    return tuple(replace(figures, values={**figures.values, **splits.get(figures.rank, {})}) for figures in ranks)


# What is left is not known while the run goes on: a step ends before the next begins.
_LIVE_PARTS = tuple(part for part in PARTS if part != "other")


def shares(ranks: Iterable[RankFigures]) -> dict[str, float]:
    """Return the share of a step of each of `PARTS`, the mean over ``ranks``; unknown parts are left out."""
    timed = [figures for figures in ranks if figures["step_s"]]
    step_s = sum(figures["step_s"] or 0.0 for figures in timed)
    seconds = {part: [figures[f"{part}_s"] for figures in timed] for part in _LIVE_PARTS}
    return {part: sum(filter(None, values)) / step_s for part, values in seconds.items() if set(values) - {None}}


class Spread(NamedTuple):
    """Minimum, median and maximum of a value over the ranks that know it, with the ranks of the extremes."""

    min: float
    min_rank: int
    median: float
    max: float
    max_rank: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment, for the live view and the sinks. Most values are metrics: see `METRICS`.

    Attributes:
        time: Unix time of rank zero's host.
        counts: The task's word for what it counts, such as tokens.
        ranks: The ranks that have reported, in order.
        event_counts: The number of events of each kind in this session.
        evaluation: The results of the last evaluation.
        logged: The last values that callbacks have logged, by name.
        is_last: Whether the run has ended.
    """

    time: float = 0.0
    step: int = 0
    num_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    elapsed_s: float = 0.0
    left_s: float | None = None
    world_size: int = 1
    num_restarts: int = 0
    num_skipped_steps: int = 0
    counts: str = "tokens"
    ranks: tuple[RankFigures, ...] = ()
    event_counts: Mapping[str, int] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)
    is_last: bool = False

    def known(self, name: str) -> list[tuple[float, int]]:
        """Return the known values of a metric of the ranks, each with its rank."""
        return [(float(value), figures.rank) for figures in self.ranks if (value := figures[name]) is not None]

    def spread(self, name: str) -> Spread | None:
        """Return the `Spread` of a metric of the ranks; None if none knows it. Of equal ranks, the first is named."""
        if not (pairs := self.known(name)):
            return None
        (low, low_rank), (high, high_rank) = min(pairs), max(pairs, key=lambda pair: (pair[0], -pair[1]))
        return Spread(low, low_rank, median(value for value, _ in pairs), high, high_rank)

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric of the ranks; None if no rank knows it."""
        return fmean(value for value, _ in pairs) if (pairs := self.known(name)) else None

    @property
    def has_failed(self) -> bool:
        """Whether this session has neither completed nor been stopped gracefully."""
        return not (self.event_counts.get("end") or self.event_counts.get("stop"))


# Prometheus gets the value of each rank, other sinks the `Spread` over the ranks.
RANK_METRICS = tuple(
    Metric(f"rank/{name}", f"lockstep_rank_{prometheus}", meaning, itemgetter(name), *scale)
    for name, prometheus, meaning, *scale in (
        ("age_s", "age_seconds", "age of the figures; large if the rank does not respond"),
        ("step_s", "step_seconds", "a whole step"),
        ("slowest_s", "slowest_step_seconds", "the longest step since the last report"),
        ("own_s", "own_work_seconds", "of a step: the rank's own work"),
        ("data_wait_s", "data_wait_seconds", "of a step: waiting for samples and their copy"),
        ("copy_s", "copy_seconds", "of a step: copying samples to the device"),
        ("forward_s", "forward_seconds", "of a step: model and loss"),
        ("backward_s", "backward_seconds", "of a step: backward without exposed communication"),
        ("exposed_s", "exposed_seconds", "of a step: communication without overlap; wire and peers"),
        ("wire_s", "wire_seconds", "of a step: transfer of gradients"),
        ("peers_s", "peers_seconds", "of a step: waiting for ranks that come later"),
        # Only for steps with a timeline of our DistributedDataParallel.
        ("hidden_s", "hidden_seconds", "of a step: communication that overlaps with backward"),
        ("optimizer_s", "optimizer_seconds", "of a step: checking, clipping and the update"),
        # Of the training thread, on CPUs only, as other devices work meanwhile.
        ("core_wait_s", "core_wait_seconds", "of a step: waiting for a core, not included in the other parts"),
        ("memory_bytes", "device_memory_bytes", "memory of tensors on the devices of the rank; not on CPUs"),
        ("memory_peak_bytes", "device_memory_peak_bytes", "maximum memory of tensors so far"),
        ("rss_bytes", "resident_memory_bytes", "resident memory of the process of the rank"),
        ("workers_rss_bytes", "workers_resident_memory_bytes", "total resident memory of its loader processes"),
        ("num_workers", "workers", "loader processes"),
        ("cpu_percent", "cpu_cores", "percent of a core, in Prometheus cores", 0.01),
        ("workers_cpu_percent", "workers_cpu_cores", "the same for its loader processes", 0.01),
        ("load", "host_load1", "load of its machine, the mean over a minute"),
        ("gpu_percent", "gpu_utilization_ratio", "share of the time in which a kernel ran", 0.01),
        ("gpu_power_w", "gpu_power_watts", "power, from NVML"),
        ("gpu_temperature_c", "gpu_temperature_celsius", "temperature, from NVML"),
        ("sent_bytes", "sent_bytes_total", "sent to other machines so far"),
        ("step_sent_bytes", "step_sent_bytes", "of a step: sent to other machines"),
        ("link_bytes_per_s", "link_bytes_per_second", "rate to the slowest machine, while there was data to send"),
    )
)


def _slowest_rank(snapshot: Snapshot) -> float | None:
    return spread.max_rank if (spread := snapshot.spread("own_s")) is not None else None


def _share(part: str) -> Metric:
    meaning = f"share of the step, over all ranks: {PARTS[part].label}"
    return Metric(f"time/{part}_share", f"lockstep_time_{part}_ratio", meaning, lambda run: shares(run.ranks).get(part))


# Of the run as a whole.
METRICS = (
    *(
        Metric(f"train/{name}", f"lockstep_train_{prometheus}", meaning, attrgetter((source or [name])[0]))
        for name, prometheus, meaning, *source in (
            ("step", "steps_total", "steps done"),
            ("num_steps", "planned_steps", "steps of the whole run; unknown for a script"),
            ("epoch", "epoch", "passes over the data set so far; unknown for a stream"),
            ("loss", "loss", "loss of the last step, the mean over its global batch"),
            ("learning_rate", "learning_rate", "of the first parameter group"),
            ("grad_norm", "gradient_norm", "norm of the whole gradient before clipping, if known"),
            ("samples_per_s", "samples_per_second", "samples that all ranks train on"),
            ("tokens_per_s", "tokens_per_second", "the same for tokens, if the task counts them"),
            ("elapsed_s", "elapsed_seconds", "since the run began or resumed"),
            ("left_s", "remaining_seconds", "until its end, at the present pace"),
            ("ranks", "ranks", "ranks of the run", "world_size"),
            ("restarts", "restarts_total", "restarts of all ranks", "num_restarts"),
            ("skipped_steps", "skipped_steps_total", "steps skipped for NaN or infinity", "num_skipped_steps"),
        )
    ),
    Metric("time/step_s", "lockstep_time_step_seconds", "a step, mean over the ranks", lambda run: run.mean("step_s")),
    Metric("time/slowest_rank", "lockstep_time_slowest_rank", "the rank with the most work of its own", _slowest_rank),
    *map(_share, _LIVE_PARTS),
)

EVALUATION = Metric("eval/{metric}", "lockstep_eval", "result of the last evaluation: the loss, and the task's metrics")
EVENT_COUNT = Metric("events/{event}", "lockstep_events_total", "events since the run began or resumed")

LOGGED = Metric("log/{name}", "lockstep_log", "number that a callback has logged")

# For the reference.
ALL_METRICS = (*METRICS, *RANK_METRICS, EVALUATION, EVENT_COUNT, LOGGED)


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """Return all known values by name, without evaluations, which have a step of their own."""
    values = {metric.name: metric.read(snapshot) for metric in METRICS}
    for metric in RANK_METRICS:
        if (spread := snapshot.spread(metric.name.removeprefix("rank/"))) is not None:
            values |= {f"{metric.name}_{statistic}": value for statistic, value in spread._asdict().items()}
    values |= {EVENT_COUNT.name_of(event): count for event, count in snapshot.event_counts.items()}
    values |= {LOGGED.name_of(name): value for name, value in snapshot.logged.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


# --- ranks that keep the others waiting in every step -----------------------------------------------------------------

# A slow rank loses at least this share of a step, and at least so many seconds, in half of the steps; and in three of
# four of them a part of that: this factor by the root of their number, as few steps may be slow by chance.
_MIN_SHARE, _MIN_LOST_S, _CERTAINTY = 0.1, 0.001, 2.5


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting in every step; ``part`` is one of `PARTS`, times are seconds per step."""

    rank: int
    part: str
    lost_s: float
    took_s: float
    usual_s: float
    step_s: float

    def __str__(self) -> str:
        lost, step, took, usual = map(milliseconds, (self.lost_s, self.step_s, self.took_s, self.usual_s))
        return (
            f"rank {self.rank} is slow: it loses {lost} in each step of {step}, in {PARTS[self.part].doing} ({took}, "
            f"usual is {usual}), and the others wait for it"
        )


# Of a rank in some steps: the seconds in each of its own parts, of its ``own`` work altogether, and of the whole step
# (``total``), by step. A dictionary of lists, as ranks send it to each other.
Pace = Mapping[str, Sequence[float]]


def pace_of(steps: Sequence[StepTimes]) -> Pace:
    """Return the pace of a rank in ``steps``."""
    return {name: [round(step.part(name), 7) for step in steps] for name in (*OWN_PARTS, "own", "total")}


def find_stragglers(paces: Mapping[int, Pace]) -> list[Straggler]:
    """Return the ranks that are persistently slower than most, the slowest first.

    Each step of a rank is compared with the same step of the others, so that what disturbs all ranks cancels. Single
    slow steps, as after a checkpoint, do not count.

    Args:
        paces: By rank, in the same steps.
    """
    by_step = {name: [*zip(*(pace[name] for pace in paces.values()), strict=True)] for name in (*OWN_PARTS, "own")}
    step_s = median(map(max, zip(*(pace["total"] for pace in paces.values()), strict=True)))
    least_s = max(_MIN_LOST_S, _MIN_SHARE * step_s)
    stragglers = []
    for place, (rank, pace) in enumerate(paces.items()):
        # Compared with the lower median: of two ranks, the faster one is as usual.
        delays = {name: sorted(times[place] - median_low(times) for times in steps) for name, steps in by_step.items()}
        work_s, lost_s = delays.pop("own"), {name: median(differences) for name, differences in delays.items()}
        if median(work_s) >= least_s and work_s[len(work_s) // 4] >= least_s * _CERTAINTY / math.sqrt(len(work_s)):
            part = max(lost_s, key=lost_s.__getitem__)
            took_s = median(pace[part])
            stragglers.append(Straggler(rank, part, median(work_s), took_s, took_s - lost_s[part], step_s))
    return sorted(stragglers, key=lambda straggler: -straggler.lost_s)


class StragglerReporter:
    """Reports which ranks are slow, and again only if a rank gets slower or is slow in another part.

    If ranks are slow in turn, no rank is the cause: that is reported once, and nothing after it.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: dict[int, tuple[str, float]] = {}
        self._are_slow_in_turn = False

    def judge(self, paces: Mapping[int, Pace]) -> None:
        """Compare the paces of all ranks in a window."""
        # After a recovery in place, ranks may have no steps in it, or not the same ones.
        counts = {len(pace["total"]) for pace in paces.values()}
        if len(counts) > 1 or 0 in counts or self._are_slow_in_turn:
            return
        stragglers = find_stragglers(paces)
        if stragglers and self._reported and self._reported.keys().isdisjoint(slow.rank for slow in stragglers):
            self._are_slow_in_turn = True
            self._report(
                f"now rank {stragglers[0].rank} is slow, and rank {max(self._reported)} is not any more: ranks are "
                "slow in turn, as when other programs use the cores (lockstep doctor names them). "
                "Slow ranks are not reported any more"
            )
            return
        for straggler in stragglers:
            part, lost_s = self._reported.get(straggler.rank, ("", 0.0))
            if straggler.part != part or straggler.lost_s > 2 * lost_s:
                self._reported[straggler.rank] = straggler.part, straggler.lost_s
                self._report(str(straggler))


# --- the steps of a recorded run --------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """The step (or steps) of a line on all ranks.

    Attributes:
        lines: As recorded.
        times: From its beginning to that of the next step; waits are only known if every rank measured its own.
        last_rank: The rank that all wait for: it waits least, or, if waiting is unknown, works longest.
        lasted_s: On the slowest rank.
    """

    lines: Mapping[int, StepLine]
    times: Mapping[int, StepTimes]
    last_rank: int
    lasted_s: float


def _align_steps(run: Recorded) -> list[_Step]:
    """Return the steps that all ranks have recorded, in order."""
    by_rank = {rank: {line.step: line for line in record.steps} for rank, record in run.ranks.items() if record.steps}
    common = set.intersection(*map(set, by_rank.values())) if by_rank else set()
    steps = []
    for number in sorted(common):
        lines = {rank: rank_lines[number] for rank, rank_lines in by_rank.items()}
        # With the time until the next step, which is that of the script, as a part of the step.
        lasted_s = {rank: max(line.times.total_s, line.lasted_s) for rank, line in lines.items()}
        times = {rank: replace(line.times, total_s=lasted_s[rank]) for rank, line in lines.items()}
        if any(parts.exposed_s is None for parts in times.values()):
            last_rank = max(lines, key=lambda rank: lines[rank].times.own_s)
            times = {rank: replace(parts, exposed_s=None) for rank, parts in times.items()}
        else:
            last_rank = min(times, key=lambda rank: times[rank].part("exposed"))
            wire_s = times[last_rank].part("exposed")
            times = {rank: replace(parts, peers_s=parts.part("exposed") - wire_s) for rank, parts in times.items()}
        steps.append(_Step(lines, times, last_rank, max(line.lasted_s for line in lines.values())))
    return steps


# The first steps allocate, compile and find the order of gradients; the means do not include them.
NUM_FIRST = 5

_SPIKE = 3.0


@dataclass(frozen=True)
class Figures:
    """The figures of a recorded run.

    Args:
        step_s: From the beginning of a step to that of the next: the mean over the steps without spikes.
        slow_step_s: One step in twenty takes longer than this.
        samples_per_s: Of the same steps.
        tokens_per_s: The same for what the loss counts; None if that is samples.
        total_s: From the beginning of the first step to the end of the last.
        by_rank: Means over the steps without spikes.
        critical: The same along the critical path; see [Note: the rank that all wait for].
        last_share: By rank, the share of steps in which it came last.
        straggler: A rank that keeps the others waiting in every step, if there is one.
    """

    step_s: float = 0.0
    slow_step_s: float = 0.0
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    total_s: float = 0.0
    by_rank: Mapping[int, StepTimes] = field(default_factory=dict)
    critical: StepTimes = field(default_factory=lambda: StepTimes(total_s=0.0))
    last_share: Mapping[int, float] = field(default_factory=dict)
    straggler: Straggler | None = None


def find_figures(run: Recorded) -> Figures:
    """Return the figures of the steps that all ranks have recorded; without ranks if there are none."""
    if not (steps := _align_steps(run)):
        return Figures()
    # Without spikes, such as a checkpoint, which would dominate the means.
    steady = steps[NUM_FIRST:] or steps
    lasted_s = sorted(step.lasted_s for step in steady)
    calm = [step for step in steady if step.lasted_s <= _SPIKE * median(lasted_s)]
    times = {rank: [step.times[rank] for step in calm] for rank in calm[0].times}
    last_ranks = Counter(step.last_rank for step in calm)
    trained_s = sum(step.lasted_s for step in calm) or math.inf
    # The counts of the global batch, which every rank has; some ranks may not have the counts.
    lines = [[*step.lines.values()] for step in calm]
    counts = [next((line.counts for line in step_lines if line.counts is not None), None) for step_lines in lines]
    records = [record.steps for record in run.ranks.values() if record.steps]
    critical = combine([step.times[step.last_rank] for step in calm])
    stragglers = [] if critical.exposed_s is None else find_stragglers({rank: pace_of(times[rank]) for rank in times})
    ended_s = max(steps[-1].time + steps[-1].times.total_s for steps in records)
    step_s = trained_s / len(calm)
    return Figures(
        step_s=step_s,
        slow_step_s=lasted_s[math.floor(0.95 * len(lasted_s))],
        samples_per_s=sum(step_lines[0].samples for step_lines in lines) / trained_s,
        tokens_per_s=None if None in counts else sum(filter(None, counts)) / trained_s,
        total_s=ended_s - min(steps[0].time for steps in records),
        by_rank={rank: combine(rank_times) for rank, rank_times in times.items()},
        critical=critical,
        last_share={rank: last_ranks[rank] / len(calm) for rank in times},
        straggler=replace(stragglers[0], step_s=step_s) if stragglers else None,
    )
