"""One snapshot of what all ranks measure, made on rank zero beside training, and handed to displays and sinks."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from typing_extensions import override

from lockstep.comm.store import StatusKeys
from lockstep.telemetry.metrics import BucketFigures, EventFigures, RankFigures, Snapshot, SnapshotSink
from lockstep.telemetry.run_record import RecordedStep, StepSeconds, seconds_between

# One rank's figures between two looks at them: sums over its steps, and what its machine last said.

_MACHINE = (
    *("memory_bytes", "memory_peak_bytes", "rss_bytes", "workers_rss_bytes", "num_workers", "cpu_percent"),
    *("workers_cpu_percent", "load", "gpu_percent", "gpu_power_w", "gpu_temperature_c"),
)


class Sums:
    """Sums of what steps took; each part over the steps that knew it."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.slowest_s = 0.0
        self._sums = [0.0] * len(StepSeconds._fields)
        self._counts = [0] * len(StepSeconds._fields)

    def add(self, took: StepSeconds) -> None:
        """Add a step."""
        self.num_steps += 1
        self.slowest_s = max(self.slowest_s, took.total_s)
        for place, value in enumerate(took):
            if value is not None:
                self._sums[place] += value
                self._counts[place] += 1

    def means(self) -> dict[str, float | None]:
        """Return the means by the names of `RankFigures`; empty if there was no step."""
        if not self.num_steps:
            return {}
        parts = zip(StepSeconds._fields, self._sums, self._counts, strict=True)
        means = {name: total / count if count else None for name, total, count in parts}
        return {"step_s": means.pop("total_s"), "slowest_s": self.slowest_s, **means}


@dataclass
class _Trips:
    """How one bucket travelled."""

    size_bytes: int
    sum_s: float = 0.0
    least_s: float = float("inf")
    most_s: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class Interval:
    """What rank zero's own figures say of the run, for the time since they were read before."""

    num_samples: int
    num_tokens: float | None
    seconds: float
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    buckets: tuple[BucketFigures, ...]
    events: tuple[EventFigures, ...]


class RankMetrics:
    """Takes what this rank measures; used by one thread.

    Args:
        rank: Of this process.
        world_size: How many ranks exchange buckets.
        host: Its machine.
        device: Where it computes.
        first_step: Steps done before.
    """

    def __init__(self, rank: int, world_size: int, *, host: str, device: str, first_step: int = 0) -> None:
        self.rank = rank
        self._who = {"rank": rank, "host": host, "device": device}
        self._bus_factor = 2 * (world_size - 1) / world_size
        self.num_done = first_step
        self._sums = Sums()
        self._whole = Sums()
        self._first = Sums()
        self._machine: dict[str, Any] = {}
        self._num_samples = self._num_counted_samples = 0
        self._num_counted = 0.0
        self._seconds = 0.0
        self._loss: float | None = None
        self._grad_norm: float | None = None
        self._rate: float | None = None
        self._trips: dict[int, _Trips] = {}
        self._events: list[EventFigures] = []

    def add_step(self, step: RecordedStep, took: StepSeconds) -> None:
        """Take a step of this rank."""
        self.num_done = step.number + 1
        if self._first.num_steps and not self._whole.num_steps:
            self._sums = Sums()  # the first step says nothing of those that follow
        self._sums.add(took)
        (self._whole if self._first.num_steps else self._first).add(took)
        self._seconds += took.total_s if step.interval_s is None else step.interval_s
        self._num_samples += step.samples
        if step.counted is not None:
            self._num_counted += float(step.counted)
            self._num_counted_samples += step.samples
        if (loss := step.loss) is not None:
            self._loss, self._rate = loss, step.learning_rate
            self._grad_norm = None if step.grad_norm is None else float(step.grad_norm)
        for bucket in (each for reduction in step.reductions for each in reduction.buckets):
            if bucket.sent is not None and bucket.done is not None:
                seconds = seconds_between(bucket.sent, bucket.done)
                trips = self._trips.setdefault(bucket.position, _Trips(bucket.size_bytes))
                trips.sum_s += seconds
                trips.least_s, trips.most_s = min(trips.least_s, seconds), max(trips.most_s, seconds)
                trips.count += 1

    def add_event(self, line: Mapping[str, Any]) -> None:
        """Take a line of kind ``event``; ``metrics`` may be in it."""
        names = ("event", "step", "time", "seconds", "text")
        self._events.append(EventFigures(**{name: line[name] for name in names}, metrics=line.get("metrics")))

    def machine(self, line: Mapping[str, Any]) -> None:
        """Take a line of kind ``machine``."""
        self._machine = {name: line.get(name) for name in _MACHINE}

    def read(self) -> tuple[RankFigures, Interval]:
        """Return the figures since they were read before."""
        figures = RankFigures(
            **self._who,  # type: ignore[arg-type]
            step=self.num_done,
            num_steps=self._sums.num_steps,
            **self._sums.means(),  # type: ignore[arg-type]
            **self._machine,
        )
        interval = Interval(
            self._num_samples,
            self._num_tokens(),
            self._seconds,
            self._loss,
            self._rate,
            self._grad_norm,
            tuple(self._bucket_figures()),
            tuple(self._events),
        )
        self._sums, self._trips, self._events = Sums(), {}, []
        self._num_samples = self._num_counted_samples = 0
        self._num_counted = 0.0
        self._seconds = 0.0
        return figures, interval

    def whole_run(self) -> RankFigures:
        """Return the means over all steps but the first; over that if there is no other."""
        sums = self._whole if self._whole.num_steps else self._first
        return RankFigures(
            **self._who,  # type: ignore[arg-type]
            step=self.num_done,
            num_steps=sums.num_steps,
            **sums.means(),  # type: ignore[arg-type]
        )

    def _num_tokens(self) -> float | None:
        """Return how many tokens there were in all samples, by those whose tokens are known."""
        if not self._num_counted_samples:
            return None
        return self._num_counted / self._num_counted_samples * self._num_samples

    def _bucket_figures(self) -> list[BucketFigures]:
        return [
            BucketFigures(
                number=number,
                size_bytes=trips.size_bytes,
                latency_s=trips.sum_s / trips.count,
                spike_s=trips.most_s,
                busbw_bytes_per_s=self._bus_factor * trips.size_bytes / max(trips.least_s, 1e-9),
            )
            for number, trips in sorted(self._trips.items())
        ]


# How long a run will take yet.


class TimeLeft:
    """Guesses from the steps since the first one that was seen done, pauses and all.

    Args:
        num_steps: Of the whole run.
        first_step: Steps done before.
    """

    def __init__(self, num_steps: int, first_step: int) -> None:
        self._num_steps, self._first_step = num_steps, first_step
        self._began_s = time.perf_counter()
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self._began_s

    def reached(self, step: int) -> None:
        """Take notice that ``step`` steps are done."""
        now_s = time.perf_counter()
        if step > self._first_step and self._first is None:
            self._first = step, now_s  # the first steps allocate and compile: they say little
        if self._last is None or step != self._last[0]:
            self._last = step, now_s

    def seconds(self) -> float | None:
        """Return the seconds until the end at the pace so far; None if no pace is known yet."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None
        (first, first_s), (last, last_s) = self._first, self._last
        since_s = time.perf_counter() - last_s
        return max(0.0, (last_s - first_s) / (last - first) * (self._num_steps - last) - since_s)


# Hands snapshots to whoever takes them, so that neither their slowness nor their errors reach training.

CLOSE_S = 10.0
"""How long the end of a run waits for a sink."""


class Dispatch(ABC):
    """Gives snapshots to one sink."""

    @abstractmethod
    def give(self, snapshot: Snapshot) -> None:
        """Hand on ``snapshot``. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Let the sink finish. Does not raise."""


class DirectDispatch(Dispatch):
    """Calls the sink at once, in the thread that makes snapshots: for those that take no time.

    Args:
        sink: Who takes them.
    """

    def __init__(self, sink: SnapshotSink) -> None:
        self._sink = sink
        self._is_off = False

    @override
    def give(self, snapshot: Snapshot) -> None:
        if self._is_off:
            return
        try:
            self._sink.update(snapshot)
        except Exception as error:
            self._is_off = True
            warn(self._sink, error)

    @override
    def close(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            if not self._is_off:
                warn(self._sink, error)
            self._is_off = True


class ThreadedDispatch(Dispatch):
    """Calls the sink in a thread of its own. While it is busy snapshots are left out, but for their events.

    Args:
        sink: Who takes them.
    """

    def __init__(self, sink: SnapshotSink) -> None:
        self._direct = DirectDispatch(sink)
        self._wake = threading.Condition()
        self._next: Snapshot | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="lockstep-sink", daemon=True)
        self._thread.start()

    @override
    def give(self, snapshot: Snapshot) -> None:
        with self._wake:
            if self._next is not None:
                snapshot = replace(snapshot, events=self._next.events + snapshot.events)
            self._next = snapshot
            self._wake.notify()

    @override
    def close(self) -> None:
        with self._wake:
            self._is_over = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._next is None and not self._is_over:
                    self._wake.wait()
                snapshot, self._next = self._next, None
            if snapshot is None:
                self._direct.close()
                return
            self._direct.give(snapshot)


def warn(sink: SnapshotSink, error: Exception) -> None:
    """Say on standard error that a sink gets nothing any more."""
    first = (str(error).splitlines() or [""])[0]
    print(
        f"lockstep: {type(sink).__name__} gets no more figures of this run: {type(error).__name__}: {first}",
        file=sys.stderr,
        flush=True,
    )


# Makes one snapshot of what all ranks tell of themselves: on rank zero, from a thread beside training.

_FIELDS = tuple(field.name for field in fields(RankFigures) if field.name != "age_s")


@dataclass(frozen=True)
class RunConstants:
    """What stays the same in a run, or is asked for at each look.

    Attributes:
        num_steps: Of the whole run.
        first_step: Steps done before.
        num_restarts: How often all ranks were started again.
        steps_per_epoch: None for a stream.
        num_skipped: Asked for the steps that were skipped so far.
        counts: What the task calls that which its loss counts.
    """

    num_steps: int
    first_step: int = 0
    num_restarts: int = 0
    steps_per_epoch: int | None = None
    num_skipped: Callable[[], int] = lambda: 0
    counts: str = "tokens"


class Aggregator:
    """Posts this rank's figures; on rank zero, gathers those of all and hands a snapshot to each of ``deliveries``.

    Args:
        figures: Of this rank.
        board: Where ranks post theirs.
        info: Of the run.
        world_size: How many ranks there are.
        deliveries: On rank zero, to whom snapshots go.
    """

    def __init__(
        self,
        figures: RankMetrics,
        board: StatusKeys,
        info: RunConstants,
        *,
        world_size: int,
        deliveries: Iterable[Dispatch] = (),
    ) -> None:
        self._figures, self._board, self._info, self._world_size = figures, board, info, world_size
        self.deliveries = list(deliveries)
        self._is_rank_zero = figures.rank == 0
        self._num_posts = 0
        self._last_own: RankFigures | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._left = TimeLeft(info.num_steps, info.first_step)

    def beat(self, *, is_last: bool = False) -> None:
        """Post, and on rank zero gather and deliver. Blocks some seconds at most, if the store does not answer."""
        figures, interval = self._figures.read()
        figures = self._kept(figures)
        if not self._is_rank_zero:
            self._num_posts += 1
            self._board.post([self._num_posts, *encode(figures)])
            return
        if not self.deliveries:
            return
        now = time.time()
        seconds = interval.seconds
        self._left.reached(figures.step)
        snapshot = Snapshot(
            time=now,
            step=figures.step,
            num_steps=self._info.num_steps,
            epoch=None if not self._info.steps_per_epoch else figures.step / self._info.steps_per_epoch,
            loss=interval.loss,
            learning_rate=interval.learning_rate,
            grad_norm=interval.grad_norm,
            samples_per_s=interval.num_samples / seconds if seconds and interval.num_samples else None,
            tokens_per_s=interval.num_tokens / seconds if seconds and interval.num_tokens else None,
            counts=self._info.counts,
            num_restarts=self._info.num_restarts,
            num_skipped_steps=self._info.num_skipped(),
            elapsed_s=self._left.elapsed_s,
            left_s=self._left.seconds(),
            ranks=with_waits((figures, *self._others())),
            world_size=self._world_size,
            buckets=interval.buckets,
            events=interval.events,
            is_last=is_last,
        )
        for delivery in self.deliveries:
            delivery.give(snapshot)

    def close(self) -> None:
        """Let everybody who was given snapshots finish."""
        for delivery in self.deliveries:
            delivery.close()

    def _kept(self, figures: RankFigures) -> RankFigures:
        """Return ``figures`` with the times of those before if no step was done since."""
        last = self._last_own
        if not figures.num_steps and last is not None and last.step_s is not None:
            new = {name: getattr(figures, name) for name in _FIELDS if getattr(figures, name) is not None}
            figures = replace(last, **{**new, "num_steps": 0})
        self._last_own = figures
        return figures

    def _others(self) -> list[RankFigures]:
        """Return what the other ranks told last, and how long ago that was seen to change."""
        now_s = time.monotonic()
        found = []
        for rank, note in sorted(self._board.read().items()):
            if not _is_note(note, rank):
                continue  # anybody who reaches the store can write there: one wrong note stops nothing
            number, *values = note
            count, since_s = self._seen.get(rank, (-1, now_s))
            if number != count:
                since_s = now_s
                self._seen[rank] = number, now_s
            found.append(replace(decode(values), age_s=now_s - since_s))
        return found


def encode(figures: RankFigures) -> list[Any]:
    """Return figures as what JSON can hold, and short."""
    values = [getattr(figures, name) for name in _FIELDS]
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def _is_note(note: Any, rank: int) -> bool:
    """Return whether a note is one that a rank has posted: a number, and values of the types of `RankFigures`."""
    if not isinstance(note, list) or len(note) != len(_FIELDS) + 1:
        return False
    named = dict(zip(("number", *_FIELDS), note, strict=True))
    texts = [named.pop("host"), named.pop("device")]
    numbers = [value for value in named.values() if value is not None]
    is_typed = all(isinstance(value, (int, float)) for value in numbers) and named["number"] is not None
    counts = (named["step"], named["num_steps"])
    return (
        is_typed
        and named["rank"] == rank
        and None not in counts
        and all(isinstance(text, str | None) for text in texts)
    )


def decode(values: Iterable[Any]) -> RankFigures:
    """Return the figures that `encode` was given."""
    named: Mapping[str, Any] = dict(zip(_FIELDS, values, strict=True))
    return RankFigures(**named)


def with_waits(ranks: Iterable[RankFigures]) -> tuple[RankFigures, ...]:
    """Return ``ranks`` with what each waited for its peers: what it was exposed longer than the one that was least.

    All ranks leave a reduction together, so the rank that comes last waits for the wire alone; see stragglers.py.
    """
    ranks = tuple(ranks)
    known = [each.exposed_s for each in ranks if each.exposed_s is not None]
    if not known:
        return ranks
    least_s = min(known)
    return tuple(each if each.exposed_s is None else replace(each, peers_s=each.exposed_s - least_s) for each in ranks)
