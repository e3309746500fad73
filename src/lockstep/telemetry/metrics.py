"""The metrics of a run: their names and meanings, and snapshots with the values of all ranks."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from statistics import mean, median
from typing import Any, NamedTuple

from lockstep.telemetry import step_times
from lockstep.telemetry.record import Event

# --- metrics ----------------------------------------------------------------------------------------------------------

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

    @property
    def label(self) -> str:
        """The word in braces."""
        return self.name.partition("{")[2].partition("}")[0]

    def name_of(self, member: str | int) -> str:
        """Return the name for one value of the label; characters that a sink does not accept become underscores."""
        return self.name.replace(f"{{{self.label}}}", _UNUSUAL.sub("_", str(member)))


def _metric(prometheus: str, meaning: str, default: Any = None, *, name: str = "", scale: float = 1.0) -> Any:
    """Return a dataclass field that is also a metric, with the name of the field unless ``name`` is given."""
    return field(default=default, metadata={"metric": (name, prometheus, meaning, scale)})


def _metrics_of(cls: type, prefix: str) -> Iterator[Metric]:
    for each in fields(cls):
        if "metric" in each.metadata:
            name, prometheus, meaning, scale = each.metadata["metric"]
            name, prometheus = f"{prefix}/{name or each.name}", f"lockstep_{prefix}_{prometheus}"
            yield Metric(name, prometheus, meaning, attrgetter(each.name), scale)


# --- of one rank ------------------------------------------------------------------------------------------------------

# The parts of a step in the live view, in order, by their names in `RankFigures`.
PARTS = {f"{name}_s": part for name, part in step_times.PARTS.items() if name != "other"}


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The last report of a rank; None is unknown. Times are means over the steps since the report before.

    Attributes:
        host: Its machine.
        device: Its device, such as ``cuda:0``.
        step: Number of steps done.
        num_steps: Number of steps in the means; 0 while it evaluates, saves or starts.
        link_peer: The address of the other machine of `link_bytes_per_s`.
    """

    rank: int
    host: str | None = None
    device: str | None = None
    step: int = 0
    num_steps: int = 0
    link_peer: str | None = None
    age_s: float = _metric("age_seconds", "age of the figures; large if the rank does not respond", 0.0)
    step_s: float | None = _metric("step_seconds", "a whole step")
    slowest_s: float | None = _metric("slowest_step_seconds", "the longest step since the last report")
    data_wait_s: float | None = _metric("data_wait_seconds", "of a step: waiting for samples and their copy")
    copy_s: float | None = _metric("copy_seconds", "of a step: copying samples to the device")
    forward_s: float | None = _metric("forward_seconds", "of a step: model and loss")
    backward_s: float | None = _metric("backward_seconds", "of a step: backward without exposed communication")
    exposed_s: float | None = _metric("exposed_seconds", "of a step: communication without overlap; wire and peers")
    # Computed by `lockstep.telemetry.aggregator.with_waits`.
    peers_s: float | None = _metric("peers_seconds", "of a step: waiting for ranks that come later")
    # Only for steps with a timeline of our DistributedDataParallel.
    hidden_s: float | None = _metric("hidden_seconds", "of a step: communication that overlaps with backward")
    optimizer_s: float | None = _metric("optimizer_seconds", "of a step: checking, clipping and the update")
    # Of the training thread, on CPUs only, as other devices work meanwhile.
    core_wait_s: float | None = _metric(
        "core_wait_seconds", "of a step: waiting for a core, not included in the other parts"
    )
    memory_bytes: int | None = _metric(
        "device_memory_bytes", "memory of tensors on the devices of the rank; not on CPUs"
    )
    memory_peak_bytes: int | None = _metric("device_memory_peak_bytes", "maximum memory of tensors so far")
    rss_bytes: int | None = _metric("resident_memory_bytes", "resident memory of the process of the rank")
    workers_rss_bytes: int | None = _metric(
        "workers_resident_memory_bytes", "total resident memory of its loader processes"
    )
    num_workers: int | None = _metric("workers", "loader processes")
    cpu_percent: float | None = _metric("cpu_cores", "percent of a core, in Prometheus cores", scale=0.01)
    workers_cpu_percent: float | None = _metric("workers_cpu_cores", "the same for its loader processes", scale=0.01)
    load: float | None = _metric("host_load1", "load of its machine, the mean over a minute")
    gpu_percent: float | None = _metric("gpu_utilization_ratio", "share of the time in which a kernel ran", scale=0.01)
    gpu_power_w: float | None = _metric("gpu_power_watts", "power, from NVML")
    gpu_temperature_c: float | None = _metric("gpu_temperature_celsius", "temperature, from NVML")
    sent_bytes: int | None = _metric("sent_bytes_total", "sent to other machines so far")
    step_sent_bytes: float | None = _metric("step_sent_bytes", "of a step: sent to other machines")
    link_bytes_per_s: float | None = _metric(
        "link_bytes_per_second", "rate to the slowest machine, while there was data to send"
    )

    @property
    def wire_s(self) -> float | None:
        """The part of ``exposed_s`` that is the transfer of gradients, not waiting for other ranks."""
        return None if self.exposed_s is None else self.exposed_s - (self.peers_s or 0.0)

    @property
    def own_s(self) -> float | None:
        """The rank's own work in a step: the time without exposed communication."""
        return None if self.step_s is None else self.step_s - (self.exposed_s or 0.0)


# Prometheus gets the value of each rank, other sinks the `Spread` over the ranks.
RANK_METRICS = (
    *_metrics_of(RankFigures, "rank"),
    Metric("rank/own_s", "lockstep_rank_own_work_seconds", "of a step: the rank's own work", attrgetter("own_s")),
    Metric("rank/wire_s", "lockstep_rank_wire_seconds", "of a step: transfer of gradients", attrgetter("wire_s")),
)


def shares(ranks: Iterable[RankFigures]) -> dict[str, float]:
    """Return the share of a step of each of `PARTS`, the mean over ``ranks``; unknown parts are left out."""
    known = [each for each in ranks if each.step_s]
    step_s = sum(each.step_s or 0.0 for each in known)
    found = {part: [seconds for each in known if (seconds := getattr(each, part)) is not None] for part in PARTS}
    return {part: sum(seconds) / step_s for part, seconds in found.items() if seconds}


# --- of the run -------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Minimum, median and maximum of a value over the ranks that know it, with the ranks of the extremes."""

    min: float
    min_rank: int
    median: float
    max: float
    max_rank: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment, for the live view and the sinks.

    Attributes:
        time: Unix time of rank zero's host.
        counts: The task's word for what it counts, such as tokens.
        ranks: The ranks that have reported, in order.
        events: The events since the last snapshot.
        event_counts: The number of events of each kind in this session.
        evaluation: The results of the last evaluation.
        is_last: Whether the run has ended.
    """

    time: float = 0.0
    step: int = _metric("steps_total", "steps done", 0)
    num_steps: int = _metric("planned_steps", "steps of the whole run", MISSING)
    epoch: float | None = _metric("epoch", "passes over the data set so far; unknown for a stream")
    loss: float | None = _metric("loss", "loss of the last step, the mean over its global batch")
    learning_rate: float | None = _metric("learning_rate", "of the first parameter group")
    grad_norm: float | None = _metric("gradient_norm", "norm of the whole gradient before clipping, if known")
    samples_per_s: float | None = _metric("samples_per_second", "samples that all ranks train on")
    tokens_per_s: float | None = _metric("tokens_per_second", "the same for tokens, if the task counts them")
    elapsed_s: float = _metric("elapsed_seconds", "since the run began or resumed", 0.0)
    left_s: float | None = _metric("remaining_seconds", "until its end, at the present pace")
    world_size: int = _metric("ranks", "ranks of the run", 1, name="ranks")
    num_restarts: int = _metric("restarts_total", "restarts of all ranks", 0, name="restarts")
    num_skipped_steps: int = _metric(
        "skipped_steps_total", "steps skipped because of NaN or infinity", 0, name="skipped_steps"
    )
    counts: str = "tokens"
    ranks: tuple[RankFigures, ...] = ()
    events: tuple[Event, ...] = ()
    event_counts: Mapping[str, int] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    is_last: bool = False

    def known(self, name: str) -> list[tuple[float, int]]:
        """Return the known values of a field of `RankFigures`, each with its rank."""
        return [(float(value), each.rank) for each in self.ranks if (value := getattr(each, name)) is not None]

    def spread(self, name: str) -> Spread | None:
        """Return the `Spread` of a field; None if no rank knows it. Of equal ranks, the first is named."""
        if not (known := self.known(name)):
            return None
        (low, low_rank), (high, high_rank) = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
        return Spread(low, low_rank, median(value for value, _ in known), high, high_rank)

    def mean(self, name: str) -> float | None:
        """Return the mean of a field over the ranks; None if no rank knows it."""
        return mean(value for value, _ in known) if (known := self.known(name)) else None

    @property
    def has_failed(self) -> bool:
        """Whether this session has neither completed nor been stopped gracefully."""
        return not (self.event_counts.get("end") or self.event_counts.get("stop"))


def _slowest_rank(snapshot: Snapshot) -> float | None:
    return spread.max_rank if (spread := snapshot.spread("own_s")) is not None else None


def _share(part: str) -> Metric:
    name, meaning = part.removesuffix("_s"), f"share of the step, over all ranks: {PARTS[part].label}"
    return Metric(f"time/{name}_share", f"lockstep_time_{name}_ratio", meaning, lambda run: shares(run.ranks).get(part))


# Of the run as a whole.
METRICS = (
    *_metrics_of(Snapshot, "train"),
    Metric(
        "time/step_s", "lockstep_time_step_seconds", "a step, the mean over the ranks", lambda run: run.mean("step_s")
    ),
    Metric("time/slowest_rank", "lockstep_time_slowest_rank", "the rank with the most work of its own", _slowest_rank),
    *(_share(part) for part in PARTS),
)

EVALUATION = Metric(
    "eval/{metric}", "lockstep_eval", "result of the last evaluation: the loss, and metrics of the task"
)
EVENT_COUNT = Metric("events/{event}", "lockstep_events_total", "events since the run began or resumed")

ALL_METRICS = (*METRICS, *RANK_METRICS, EVALUATION, EVENT_COUNT)

# Only in Prometheus: always 1, with the labels ``rank``, ``host`` and ``device``.
RANK_INFO = "lockstep_rank_info"
# Only in Prometheus: always 1, with facts about the run as labels; see docs/watching.md.
RUN_INFO = "lockstep_run_info"
# Only in Prometheus: the Unix time of the figures.
UPDATED = "lockstep_updated_timestamp_seconds"


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """Return all known values by name, without evaluations, which have a step of their own."""
    found = {metric.name: metric.read(snapshot) for metric in METRICS}
    for metric in RANK_METRICS:
        if (spread := snapshot.spread(metric.name.removeprefix("rank/"))) is not None:
            found |= {f"{metric.name}_{which}": value for which, value in spread._asdict().items()}
    found |= {EVENT_COUNT.name_of(event): count for event, count in snapshot.event_counts.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def evaluations(snapshot: Snapshot) -> Iterator[tuple[Event, dict[str, float]]]:
    """Yield the evaluations since the last snapshot, with their results by the names in sinks."""
    for event in snapshot.events:
        if event.metrics:
            yield event, {EVALUATION.name_of(name): value for name, value in event.metrics.items()}


class SnapshotSink(ABC):
    """Gets snapshots on rank zero, about once a second, in a thread of its own.

    Must not use CUDA or collectives. If it blocks, snapshots are dropped, and training continues. If it raises, it gets
    no more snapshots, and a warning is printed.
    """

    @abstractmethod
    def update(self, snapshot: Snapshot) -> None:
        """Handle ``snapshot``; the last one of a run has ``is_last``."""

    @abstractmethod
    def close(self) -> None:
        """Write the remaining data. Called once, also after an error of `update`."""
