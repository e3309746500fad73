"""The metrics of a run: their names, and their values of all ranks at one moment."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

# What is known of a run at one moment, of all its ranks: what the live view shows and metrics sinks are given.

PARTS = ("data_wait_s", "forward_s", "backward_s", "wire_s", "peers_s", "optimizer_s")
"""What the time of a step went into, in the order in which it passes; names of `RankFigures`."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank last told of itself; None is what it does not know.

    Times are means over the steps since it told before.

    Attributes:
        rank: Its number.
        host: Its machine.
        device: Where it computes, such as ``cuda:0``.
        age_s: How old the figures are; much more than the period if it stands still, or is gone.
        step: Steps done.
        num_steps: Steps that the times stand for; 0 while it evaluates, saves or has only begun.
        step_s: A whole step.
        slowest_s: The longest of these steps.
        data_wait_s: Waiting for samples, and for their copy to the device.
        copy_s: Copying samples to the device, beside other work.
        forward_s: Model and loss.
        backward_s: Backward, without exposed communication where that is known.
        exposed_s: Waiting for gradients and the sum of the losses, after this rank's own work.
        peers_s: The part of ``exposed_s`` in which it waited for ranks that came later.
        hidden_s: Time in which buckets travelled beside backward.
        optimizer_s: Dividing, clipping, checking the gradient, and the update.
        memory_bytes: Held by tensors on its devices.
        memory_peak_bytes: The most that tensors held so far.
        rss_bytes: Resident memory of its process.
        workers_rss_bytes: Resident memory of its loader processes together.
        num_workers: Its loader processes.
        cpu_percent: Of one core, used by its process.
        workers_cpu_percent: Of one core, used by its loader processes together.
        load: Of its machine, the mean over a minute.
        gpu_percent: Part of the time in which a kernel ran.
        gpu_power_w: Power.
        gpu_temperature_c: Temperature.
    """

    rank: int
    host: str | None = None
    device: str | None = None
    age_s: float = 0.0
    step: int = 0
    num_steps: int = 0
    step_s: float | None = None
    slowest_s: float | None = None
    data_wait_s: float | None = None
    copy_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    exposed_s: float | None = None
    peers_s: float | None = None
    hidden_s: float | None = None
    optimizer_s: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    rss_bytes: int | None = None
    workers_rss_bytes: int | None = None
    num_workers: int | None = None
    cpu_percent: float | None = None
    workers_cpu_percent: float | None = None
    load: float | None = None
    gpu_percent: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: float | None = None

    @property
    def wire_s(self) -> float | None:
        """The part of ``exposed_s`` in which no other rank was waited for: the gradients were on their way."""
        return None if self.exposed_s is None else self.exposed_s - (self.peers_s or 0.0)

    @property
    def own_s(self) -> float | None:
        """The rank's own work of a step: what is left without exposed communication."""
        return None if self.step_s is None else self.step_s - (self.exposed_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class BucketFigures:
    """How one bucket of gradients travelled since the last snapshot, where that was looked at.

    Attributes:
        number: Of the bucket, in the order of their collectives.
        size_bytes: Its size.
        latency_s: From its start to its end on rank zero, the mean of the steps looked at.
        spike_s: The longest of these.
        busbw_bytes_per_s: Bus bandwidth, ``size_bytes * 2 (n - 1) / n`` by the shortest of them.
    """

    number: int
    size_bytes: int
    latency_s: float
    spike_s: float
    busbw_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class EventFigures:
    """Something that happened, on rank zero unless ``rank`` says otherwise.

    Attributes:
        event: Which of ``EVENTS`` in lockstep.telemetry.run_record.
        step: Steps done by then.
        time: Unix time.
        seconds: How long training stood still for it, if it did.
        text: What happened, in words.
        rank: Which rank told it.
        metrics: What an evaluation found, by name; None for other events.
    """

    event: str
    step: int
    time: float
    seconds: float | None
    text: str
    rank: int = 0
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Spread:
    """The least, the middle and the most of a figure over the ranks that know it, and which ranks those are."""

    min: float
    min_rank: int
    median: float
    max: float
    max_rank: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        time: Unix time of rank zero's host.
        step: Steps done.
        num_steps: Of the whole run.
        epoch: Passes over the data set so far; None for a stream.
        loss: Of the last step whose loss is known: the mean over its global batch.
        learning_rate: Of that step, of the first parameter group.
        grad_norm: Of that step, before clipping; None if nothing needed it.
        samples_per_s: Over all ranks, since the last snapshot; None if no step was done.
        tokens_per_s: Likewise, what the task counts; None if that is samples.
        counts: What the task calls it.
        num_restarts: How often all ranks were started again.
        num_skipped_steps: Steps skipped or gone back from so far, as their gradient was not finite.
        elapsed_s: Since this run began, or went on.
        left_s: Until the end at the pace so far; None if that is not known.
        ranks: By rank; those that have told something.
        world_size: How many ranks there are.
        buckets: Of rank zero; empty if none was looked at since the last snapshot.
        events: New since the last snapshot.
        is_last: Whether the run is over.
    """

    time: float
    step: int
    num_steps: int
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    counts: str = "tokens"
    num_restarts: int = 0
    num_skipped_steps: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    ranks: tuple[RankFigures, ...] = ()
    world_size: int = 1
    buckets: tuple[BucketFigures, ...] = ()
    events: tuple[EventFigures, ...] = ()
    is_last: bool = False

    def spread(self, name: str) -> Spread | None:
        """Return the extremes and the median of a figure by its name in `RankFigures`; None if no rank knows it."""
        known = [(float(value), each.rank) for each in self.ranks if (value := getattr(each, name)) is not None]
        if not known:
            return None
        (low, low_rank), (high, high_rank) = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
        return Spread(low, low_rank, median(value for value, _ in known), high, high_rank)

    def mean(self, name: str) -> float | None:
        """Return the mean over the ranks of a figure by its name; None if no rank knows it."""
        known = [float(value) for each in self.ranks if (value := getattr(each, name)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def slowest(self) -> RankFigures | None:
        """The rank whose own work of a step takes longest, for which the others wait; None if nothing is known yet."""
        known = [each for each in self.ranks if each.own_s is not None]
        return max(known, key=lambda each: (each.own_s or 0.0, -each.rank), default=None)


class SnapshotSink(ABC):
    """Takes snapshots on rank zero, about every other second, from a thread beside training.

    Must not touch CUDA or any collective. May block: then later snapshots are left out, and training goes on. One that
    raises is switched off with a warning.
    """

    @abstractmethod
    def update(self, snapshot: Snapshot) -> None:
        """Take ``snapshot``; the last one of a run has ``is_last``."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left. Called once, also after an error of `update`."""


# The names under which sinks give the figures of a run. Dashboards depend on them: frozen by a test.
#
# docs/reference/metrics.md lists them from here. Names end in their unit; Prometheus has rules of its own for names
# (base units, ``_total`` for what only grows), so each figure has one there as well.


@dataclass(frozen=True)
class Metric:
    """A figure of the run as a whole.

    Attributes:
        name: Such as ``train/loss``.
        prometheus: Such as ``lockstep_train_loss``; what only grows ends in ``_total``.
        meaning: In words.
        read: Takes it from a snapshot; None where it is not known.
    """

    name: str
    prometheus: str
    meaning: str
    read: Callable[[Snapshot], float | None]


@dataclass(frozen=True)
class RankMetric:
    """A figure that each rank has: one for each in Prometheus, its spread over the ranks elsewhere; see `SPREAD`.

    Attributes:
        name: Such as ``rank/step_s``.
        prometheus: Such as ``lockstep_rank_step_seconds``, with the label ``rank``.
        meaning: In words.
        figure: Name of it in `RankFigures`.
        unit: How much of Prometheus' unit one of ours is.
    """

    name: str
    prometheus: str
    meaning: str
    figure: str
    unit: float = 1.0


SPREAD = ("min", "min_rank", "median", "max", "max_rank")
"""What is given of a rank's figure where there is a single line for all ranks, such as ``rank/step_s_max_rank``."""


def _slowest(snapshot: Snapshot) -> float | None:
    return None if snapshot.slowest is None else snapshot.slowest.rank


def _share(part: str) -> Callable[[Snapshot], float | None]:
    """Return what reads the part of the step that went into ``part``, over all ranks."""

    def read(snapshot: Snapshot) -> float | None:
        part_s, step_s = snapshot.mean(part), snapshot.mean("step_s")
        return None if part_s is None or not step_s else part_s / step_s

    return read


_SHARES = {
    "data_wait_s": "waiting for samples",
    "forward_s": "model and loss",
    "backward_s": "backward, without what follows",
    "wire_s": "waiting for gradients on their way",
    "peers_s": "waiting for ranks that come later",
    "optimizer_s": "the update",
}

METRICS = (
    Metric("train/step", "lockstep_train_steps_total", "steps done", attrgetter("step")),
    Metric("train/num_steps", "lockstep_train_planned_steps", "steps of the whole run", attrgetter("num_steps")),
    Metric("train/epoch", "lockstep_train_epoch", "passes over the data set so far", attrgetter("epoch")),
    Metric("train/loss", "lockstep_train_loss", "of the last step, the mean over its global batch", attrgetter("loss")),
    Metric(
        "train/learning_rate",
        "lockstep_train_learning_rate",
        "of the first parameter group",
        attrgetter("learning_rate"),
    ),
    Metric(
        "train/grad_norm",
        "lockstep_train_gradient_norm",
        "of the whole gradient before clipping, where something needed it",
        attrgetter("grad_norm"),
    ),
    Metric(
        "train/samples_per_s",
        "lockstep_train_samples_per_second",
        "samples trained on by all ranks together",
        attrgetter("samples_per_s"),
    ),
    Metric(
        "train/tokens_per_s",
        "lockstep_train_tokens_per_second",
        "likewise tokens, for a task that counts them",
        attrgetter("tokens_per_s"),
    ),
    Metric(
        "train/elapsed_s",
        "lockstep_train_elapsed_seconds",
        "since the run began, or went on",
        attrgetter("elapsed_s"),
    ),
    Metric(
        "train/left_s", "lockstep_train_remaining_seconds", "until its end, at the pace so far", attrgetter("left_s")
    ),
    Metric("train/ranks", "lockstep_train_ranks", "ranks of the run", attrgetter("world_size")),
    Metric(
        "train/restarts",
        "lockstep_train_restarts_total",
        "how often all ranks were started again",
        attrgetter("num_restarts"),
    ),
    Metric(
        "train/skipped_steps",
        "lockstep_train_skipped_steps_total",
        "steps skipped or gone back from, as their gradient was not finite",
        attrgetter("num_skipped_steps"),
    ),
    Metric(
        "time/step_s",
        "lockstep_time_step_seconds",
        "a step, the mean over the ranks",
        lambda snapshot: snapshot.mean("step_s"),
    ),
    Metric(
        "time/slowest_rank",
        "lockstep_time_slowest_rank",
        "the rank whose own work takes longest, for which the others wait",
        _slowest,
    ),
    *(
        Metric(
            f"time/{part[:-2]}_share",
            f"lockstep_time_{part[:-2]}_ratio",
            f"part of the step, over all ranks: {_SHARES[part]}",
            _share(part),
        )
        for part in PARTS
    ),
)


def _of_rank(figure: str, prometheus: str, meaning: str, unit: float = 1.0) -> RankMetric:
    return RankMetric(f"rank/{figure}", f"lockstep_rank_{prometheus}", meaning, figure, unit)


RANK_METRICS = (
    _of_rank("age_s", "age_seconds", "how old the rank's figures are; much, if it stands still or is gone"),
    _of_rank("step_s", "step_seconds", "a whole step"),
    _of_rank("slowest_s", "slowest_step_seconds", "the longest step since the figures before"),
    _of_rank("own_s", "own_work_seconds", "of a step: the rank's own work, without waiting for others"),
    _of_rank("data_wait_s", "data_wait_seconds", "of a step: waiting for samples, and for their copy to the device"),
    _of_rank("copy_s", "copy_seconds", "of a step: copying samples to the device, beside other work"),
    _of_rank("forward_s", "forward_seconds", "of a step: model and loss"),
    _of_rank("backward_s", "backward_seconds", "of a step: backward, without exposed communication"),
    _of_rank("exposed_s", "exposed_seconds", "of a step: communication that nothing hid; wire and peers together"),
    _of_rank("wire_s", "wire_seconds", "of a step: waiting for gradients on their way"),
    _of_rank("peers_s", "peers_seconds", "of a step: waiting for ranks that come later"),
    _of_rank("hidden_s", "hidden_seconds", "of a step: communication beside backward"),
    _of_rank("optimizer_s", "optimizer_seconds", "of a step: checking and clipping the gradient, and the update"),
    _of_rank("memory_bytes", "device_memory_bytes", "held by tensors on the rank's devices; not on CPUs"),
    _of_rank("memory_peak_bytes", "device_memory_peak_bytes", "the most that tensors held so far"),
    _of_rank("rss_bytes", "resident_memory_bytes", "resident memory of the rank's process"),
    _of_rank("workers_rss_bytes", "workers_resident_memory_bytes", "and of its loader processes together"),
    _of_rank("num_workers", "workers", "loader processes"),
    _of_rank("cpu_percent", "cpu_cores", "used by the process; percent of a core, in Prometheus cores", 0.01),
    _of_rank("workers_cpu_percent", "workers_cpu_cores", "likewise, by its loader processes together", 0.01),
    _of_rank("load", "host_load1", "of its machine, the mean over a minute"),
    _of_rank("gpu_percent", "gpu_utilization_ratio", "part of the time in which a kernel ran, as NVML says", 0.01),
    _of_rank("gpu_power_w", "gpu_power_watts", "power, as NVML says"),
    _of_rank("gpu_temperature_c", "gpu_temperature_celsius", "temperature, as NVML says"),
)


@dataclass(frozen=True)
class Family:
    """Figures of which there is one for each of something.

    Attributes:
        name: With the place of what it is of in braces, such as ``eval/{metric}``.
        prometheus: With what is in braces as its label.
        meaning: In words.
    """

    name: str
    prometheus: str
    meaning: str

    @property
    def label(self) -> str:
        """What there is one for each of."""
        return self.name.partition("{")[2].partition("}")[0]


BUCKET_LATENCY = Family(
    "bucket/{bucket}_latency_s",
    "lockstep_bucket_latency_seconds",
    "from the start of a bucket's collective to its end on rank zero, the mean of the steps looked at",
)
BUCKET_SPIKE = Family("bucket/{bucket}_spike_s", "lockstep_bucket_spike_seconds", "the longest of them")
BUCKET_BANDWIDTH = Family(
    "bucket/{bucket}_busbw_bytes_per_s",
    "lockstep_bucket_bus_bytes_per_second",
    "bus bandwidth, by the shortest of them",
)
BUCKET_SIZE = Family("bucket/{bucket}_size_bytes", "lockstep_bucket_size_bytes", "size of the bucket")
EVALUATION = Family("eval/{metric}", "lockstep_eval", "what the last evaluation found: the loss, and the task's own")
EVENT_COUNT = Family(
    "events/{event}", "lockstep_events_total", "events since the run began, or went on; by the names of the record"
)
EVENT_SECONDS = Family(
    "events/{event}_s", "lockstep_event_pause_seconds_total", "how long training stood still for them, together"
)

FAMILIES = (
    BUCKET_LATENCY,
    BUCKET_SPIKE,
    BUCKET_BANDWIDTH,
    BUCKET_SIZE,
    EVALUATION,
    EVENT_COUNT,
    EVENT_SECONDS,
)

RANK_INFO = "lockstep_rank_info"
"""In Prometheus alone: always 1, with the labels ``rank``, ``host`` and ``device``."""
RUN_INFO = "lockstep_run_info"
"""In Prometheus alone: always 1, with what the run is as labels; see docs/watching.md."""
UPDATED = "lockstep_updated_timestamp_seconds"
"""In Prometheus alone: when the figures were taken, in Unix time."""


# A snapshot as numbers by name: pure functions of it, and the counts of what has happened so far.

_UNUSUAL = re.compile(r"[^\w.-]", re.ASCII)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: its metrics by name, after so many steps, at a Unix time."""

    step: int
    time: float
    metrics: Mapping[str, float]


class EventCounts:
    """Counts the events of a session, and remembers its last evaluation."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.evaluation: Mapping[str, float] = {}

    def add(self, events: Iterable[EventFigures]) -> None:
        """Count ``events``."""
        for event in events:
            self.counts[event.event] += 1
            if event.seconds is not None:
                self.seconds[event.event] = self.seconds.get(event.event, 0.0) + event.seconds
            if event.metrics:
                self.evaluation = event.metrics


def scalars(snapshot: Snapshot, tally: EventCounts) -> dict[str, float]:
    """Return all that is known, by name; evaluations apart, which have a step of their own."""
    found = {metric.name: metric.read(snapshot) for metric in METRICS}
    known = {name: float(value) for name, value in found.items() if value is not None}
    for metric in RANK_METRICS:
        if (spread := snapshot.spread(metric.figure)) is not None:
            known |= {f"{metric.name}_{each}": float(getattr(spread, each)) for each in SPREAD}
    for bucket in snapshot.buckets:
        known |= {name_in(family, bucket.number): value for family, value in of_bucket(bucket)}
    known |= {name_in(EVENT_COUNT, event): float(count) for event, count in tally.counts.items()}
    known |= {name_in(EVENT_SECONDS, event): seconds for event, seconds in tally.seconds.items()}
    return known


def evaluations(snapshot: Snapshot) -> Iterator[Evaluation]:
    """Give the evaluations since the snapshot before, their metrics by the names that sinks have for them."""
    for event in snapshot.events:
        if event.metrics:
            metrics = {name_in(EVALUATION, name): value for name, value in event.metrics.items()}
            yield Evaluation(event.step, event.time, metrics)


def of_bucket(bucket: BucketFigures) -> Iterator[tuple[Family, float]]:
    """Give the figures of a bucket."""
    yield BUCKET_LATENCY, bucket.latency_s
    yield BUCKET_SPIKE, bucket.spike_s
    yield BUCKET_BANDWIDTH, bucket.busbw_bytes_per_s
    yield BUCKET_SIZE, float(bucket.size_bytes)


def name_in(family: Family, member: str | int) -> str:
    """Return the name of a figure of ``family``; what no sink takes in a name becomes an underscore."""
    return family.name.replace(f"{{{family.label}}}", _UNUSUAL.sub("_", str(member)))


def has_failed(counts: Mapping[str, int]) -> bool:
    """Return whether a session with these events has not ended in order."""
    return not (counts.get("end") or counts.get("stop"))
