"""The names under which sinks give the figures of a run. Dashboards depend on them: frozen by a test.

docs/metrics.md lists them in tables that are compared with these. Names end in their unit; Prometheus has rules of its
own for names (base units, ``_total`` for what only grows), so each figure has one there as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from lockstep.telemetry.live.snapshot import PARTS, Snapshot


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
"""In Prometheus alone: always 1, with what the run is as labels; see docs/sinks.md."""
UPDATED = "lockstep_updated_timestamp_seconds"
"""In Prometheus alone: when the figures were taken, in Unix time."""
