"""The metrics of a run: each declared once, with its names and meaning, and their values of all ranks at one moment."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from statistics import mean, median
from typing import Any, NamedTuple

# --- what a metric is -------------------------------------------------------------------------------------------------

_UNUSUAL = re.compile(r"[^\w.-]", re.ASCII)


@dataclass(frozen=True)
class Metric:
    """A number that sinks get. Dashboards depend on its names: frozen by a test, listed in docs/reference/metrics.md.

    Attributes:
        name: With the unit at its end, such as ``train/loss`` or ``rank/step_s``. In braces stands what there is one
            for each of, such as ``eval/{metric}``.
        prometheus: The same by Prometheus' rules: base units, and ``_total`` for what only grows. What is in braces in
            ``name`` is a label there, and so is the rank.
        meaning: In words.
        read: Takes it from a `Snapshot` or a `RankFigures`; None where it is not known.
        scale: How much of Prometheus' unit one of ours is.
    """

    name: str
    prometheus: str
    meaning: str
    read: Callable[[Any], float | None] = lambda _: None
    scale: float = 1.0

    @property
    def label(self) -> str:
        """What there is one for each of."""
        return self.name.partition("{")[2].partition("}")[0]

    def name_of(self, member: str | int) -> str:
        """Return the name for one of them; what some sink does not take in a name becomes an underscore."""
        return self.name.replace(f"{{{self.label}}}", _UNUSUAL.sub("_", str(member)))


def _metric(prometheus: str, meaning: str, default: Any = None, *, name: str = "", scale: float = 1.0) -> Any:
    """Return a field of a dataclass that is a metric as well, by its own name unless ``name`` is given."""
    return field(default=default, metadata={"metric": (name, prometheus, meaning, scale)})


def _metrics_of(cls: type, prefix: str) -> Iterator[Metric]:
    for each in fields(cls):
        if "metric" in each.metadata:
            name, prometheus, meaning, scale = each.metadata["metric"]
            name, prometheus = f"{prefix}/{name or each.name}", f"lockstep_{prefix}_{prometheus}"
            yield Metric(name, prometheus, meaning, attrgetter(each.name), scale)


# --- of one rank ------------------------------------------------------------------------------------------------------

# What the time of a step goes into, in the order in which it passes; names of `RankFigures`.
PARTS = {
    "data_wait_s": "waiting for samples",
    "forward_s": "model and loss",
    "backward_s": "backward, without what follows",
    "wire_s": "waiting for gradients on their way",
    "peers_s": "waiting for ranks that come later",
    "optimizer_s": "the update",
}


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank reported last; None is what it does not know. Times are means over the steps since it did before.

    Attributes:
        host: Its machine.
        device: Where it computes, such as ``cuda:0``.
        step: Steps done.
        num_steps: Steps that the times stand for; 0 while it evaluates, saves or has only begun.
        link_peer: The address of the machine that `link_bytes_per_s` is about.
    """

    rank: int
    host: str | None = None
    device: str | None = None
    step: int = 0
    num_steps: int = 0
    link_peer: str | None = None
    age_s: float = _metric("age_seconds", "how old the figures are; much, if the rank stands still", 0.0)
    step_s: float | None = _metric("step_seconds", "a whole step")
    slowest_s: float | None = _metric("slowest_step_seconds", "the longest step since the figures before")
    data_wait_s: float | None = _metric("data_wait_seconds", "of a step: waiting for samples and their copy")
    copy_s: float | None = _metric("copy_seconds", "of a step: copying samples to the device")
    forward_s: float | None = _metric("forward_seconds", "of a step: model and loss")
    backward_s: float | None = _metric("backward_seconds", "of a step: backward without exposed communication")
    exposed_s: float | None = _metric("exposed_seconds", "of a step: communication that nothing hid; wire and peers")
    # Not measured but compared: see `with_waits` in lockstep.telemetry.aggregator.
    peers_s: float | None = _metric("peers_seconds", "of a step: waiting for ranks that come later")
    # Only of steps with a timeline, and of our DistributedDataParallel: others do not report when buckets travelled.
    hidden_s: float | None = _metric("hidden_seconds", "of a step: communication beside backward")
    optimizer_s: float | None = _metric("optimizer_seconds", "of a step: checking, clipping and the update")
    memory_bytes: int | None = _metric("device_memory_bytes", "held by tensors on the rank's devices; not on CPUs")
    memory_peak_bytes: int | None = _metric("device_memory_peak_bytes", "the most that tensors held so far")
    rss_bytes: int | None = _metric("resident_memory_bytes", "resident memory of the rank's process")
    workers_rss_bytes: int | None = _metric("workers_resident_memory_bytes", "and of its loader processes together")
    num_workers: int | None = _metric("workers", "loader processes")
    cpu_percent: float | None = _metric("cpu_cores", "percent of a core, in Prometheus cores", scale=0.01)
    workers_cpu_percent: float | None = _metric("workers_cpu_cores", "likewise, by its loader processes", scale=0.01)
    load: float | None = _metric("host_load1", "of its machine, the mean over a minute")
    gpu_percent: float | None = _metric("gpu_utilization_ratio", "part of the time in which a kernel ran", scale=0.01)
    gpu_power_w: float | None = _metric("gpu_power_watts", "power, as NVML says")
    gpu_temperature_c: float | None = _metric("gpu_temperature_celsius", "temperature, as NVML says")
    sent_bytes: int | None = _metric("sent_bytes_total", "sent to other machines so far")
    step_sent_bytes: float | None = _metric("step_sent_bytes", "of a step: sent to other machines")
    link_bytes_per_s: float | None = _metric(
        "link_bytes_per_second", "to the slowest machine, while there was any to send"
    )

    @property
    def wire_s(self) -> float | None:
        """The part of ``exposed_s`` in which no other rank was waited for: the gradients were on their way."""
        return None if self.exposed_s is None else self.exposed_s - (self.peers_s or 0.0)

    @property
    def own_s(self) -> float | None:
        """The rank's own work of a step: what is left without exposed communication."""
        return None if self.step_s is None else self.step_s - (self.exposed_s or 0.0)


# Each rank has them: one for each in Prometheus, elsewhere the `Spread` over the ranks.
RANK_METRICS = (
    *_metrics_of(RankFigures, "rank"),
    Metric("rank/own_s", "lockstep_rank_own_work_seconds", "of a step: the rank's own work", attrgetter("own_s")),
    Metric("rank/wire_s", "lockstep_rank_wire_seconds", "of a step: gradients on their way", attrgetter("wire_s")),
)


def shares(ranks: Iterable[RankFigures]) -> dict[str, float]:
    """Return what part of a step went into which of `PARTS`, the mean over ``ranks``; without those nobody knows."""
    known = [each for each in ranks if each.step_s]
    step_s = sum(each.step_s or 0.0 for each in known)
    found = {part: [seconds for each in known if (seconds := getattr(each, part)) is not None] for part in PARTS}
    return {part: sum(seconds) / step_s for part, seconds in found.items() if seconds}


# --- of the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EventFigures:
    """Something that happened, on rank zero.

    Attributes:
        event: Which of ``EVENTS`` in lockstep.telemetry.run_record.
        step: Steps done by then.
        time: Unix time.
        seconds: How long training stood still for it, if it did.
        text: What happened, in words.
        metrics: What an evaluation found, by name; None for other events.
    """

    event: str
    step: int
    time: float
    seconds: float | None
    text: str
    metrics: Mapping[str, float] | None = None


class Spread(NamedTuple):
    """The least, the middle and the most of a figure over the ranks that know it, and which ranks those are."""

    min: float
    min_rank: int
    median: float
    max: float
    max_rank: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment: what the live view shows and sinks are given.

    Attributes:
        time: Unix time of rank zero's host.
        counts: What the task calls that which it counts, such as tokens.
        ranks: By rank; those that have reported something.
        events: New since the last snapshot.
        event_counts: How many there were of each kind since this session began.
        evaluation: What the last evaluation found.
        is_last: Whether the run is over.
    """

    time: float = 0.0
    step: int = _metric("steps_total", "steps done", 0)
    num_steps: int = _metric("planned_steps", "steps of the whole run", MISSING)
    epoch: float | None = _metric("epoch", "passes over the data set so far; none for a stream")
    loss: float | None = _metric("loss", "of the last step, the mean over its global batch")
    learning_rate: float | None = _metric("learning_rate", "of the first parameter group")
    grad_norm: float | None = _metric("gradient_norm", "of the whole gradient before clipping, if known")
    samples_per_s: float | None = _metric("samples_per_second", "samples trained on by all ranks together")
    tokens_per_s: float | None = _metric("tokens_per_second", "likewise tokens, for a task that counts them")
    elapsed_s: float = _metric("elapsed_seconds", "since the run began, or went on", 0.0)
    left_s: float | None = _metric("remaining_seconds", "until its end, at the pace so far")
    world_size: int = _metric("ranks", "ranks of the run", 1, name="ranks")
    num_restarts: int = _metric("restarts_total", "how often all ranks were started again", 0, name="restarts")
    num_skipped_steps: int = _metric(
        "skipped_steps_total", "steps left out for a NaN or infinity", 0, name="skipped_steps"
    )
    counts: str = "tokens"
    ranks: tuple[RankFigures, ...] = ()
    events: tuple[EventFigures, ...] = ()
    event_counts: Mapping[str, int] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    is_last: bool = False

    def known(self, name: str) -> list[tuple[float, int]]:
        """Return a figure by its name in `RankFigures`, and the rank, of those that know it."""
        return [(float(value), each.rank) for each in self.ranks if (value := getattr(each, name)) is not None]

    def spread(self, name: str) -> Spread | None:
        """Return the extremes and the median of a figure; None if no rank knows it. Of equal ranks the first counts."""
        if not (known := self.known(name)):
            return None
        (low, low_rank), (high, high_rank) = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
        return Spread(low, low_rank, median(value for value, _ in known), high, high_rank)

    def mean(self, name: str) -> float | None:
        """Return the mean over the ranks of a figure; None if no rank knows it."""
        return mean(value for value, _ in known) if (known := self.known(name)) else None

    @property
    def has_failed(self) -> bool:
        """Whether this session, which is over, has not ended in order."""
        return not (self.event_counts.get("end") or self.event_counts.get("stop"))


def _slowest_rank(snapshot: Snapshot) -> float | None:
    return spread.max_rank if (spread := snapshot.spread("own_s")) is not None else None


def _share(part: str) -> Metric:
    name, meaning = part.removesuffix("_s"), f"part of the step, over all ranks: {PARTS[part]}"
    return Metric(f"time/{name}_share", f"lockstep_time_{name}_ratio", meaning, lambda run: shares(run.ranks).get(part))


# Of the run as a whole.
METRICS = (
    *_metrics_of(Snapshot, "train"),
    Metric(
        "time/step_s", "lockstep_time_step_seconds", "a step, the mean over the ranks", lambda run: run.mean("step_s")
    ),
    Metric("time/slowest_rank", "lockstep_time_slowest_rank", "whose own work takes longest", _slowest_rank),
    *(_share(part) for part in PARTS),
)

EVALUATION = Metric("eval/{metric}", "lockstep_eval", "what the last evaluation found: the loss, and the task's own")
EVENT_COUNT = Metric("events/{event}", "lockstep_events_total", "events since the run began, or went on")

ALL_METRICS = (*METRICS, *RANK_METRICS, EVALUATION, EVENT_COUNT)

# In Prometheus alone: always 1, with the labels ``rank``, ``host`` and ``device``.
RANK_INFO = "lockstep_rank_info"
# In Prometheus alone: always 1, with what the run is as labels; see docs/watching.md.
RUN_INFO = "lockstep_run_info"
# In Prometheus alone: when the figures were taken, in Unix time.
UPDATED = "lockstep_updated_timestamp_seconds"


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """Return all that is known, by name; evaluations apart, which have a step of their own."""
    found = {metric.name: metric.read(snapshot) for metric in METRICS}
    for metric in RANK_METRICS:
        if (spread := snapshot.spread(metric.name.removeprefix("rank/"))) is not None:
            found |= {f"{metric.name}_{which}": value for which, value in spread._asdict().items()}
    found |= {EVENT_COUNT.name_of(event): count for event, count in snapshot.event_counts.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def evaluations(snapshot: Snapshot) -> Iterator[tuple[EventFigures, dict[str, float]]]:
    """Yield the evaluations since the snapshot before, and what they found by the names that sinks have for it."""
    for event in snapshot.events:
        if event.metrics:
            yield event, {EVALUATION.name_of(name): value for name, value in event.metrics.items()}


class SnapshotSink(ABC):
    """Takes snapshots on rank zero, about once a second, from a thread beside training.

    Must not touch CUDA or any collective. May block: then later snapshots are left out, and training goes on. One that
    raises is switched off with a warning.
    """

    @abstractmethod
    def update(self, snapshot: Snapshot) -> None:
        """Take ``snapshot``; the last one of a run has ``is_last``."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left. Called once, also after an error of `update`."""
