"""What is known of a run at one moment, of all its ranks: what the live view shows and metrics sinks are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

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
        event: Which of ``EVENTS`` in lockstep.telemetry.record.names.
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
