"""One rank's figures between two looks at them: sums over its steps, and what its machine last said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.telemetry.live.snapshot import BucketFigures, EventFigures, RankFigures
from lockstep.telemetry.record.measured import Measured

_MACHINE = (
    *("memory_bytes", "memory_peak_bytes", "rss_bytes", "workers_rss_bytes", "num_workers", "cpu_percent"),
    *("workers_cpu_percent", "load", "gpu_percent", "gpu_power_w", "gpu_temperature_c"),
)


class Sums:
    """Sums of what steps took. A part is known if every step knew it; `hidden_s` is known of some steps only."""

    def __init__(self) -> None:
        self.num_steps = self.num_hidden = self.num_exposed = 0
        self.total_s = self.data_wait_s = self.forward_s = self.backward_s = self.optimizer_s = 0.0
        self.exposed_s = self.copy_s = self.hidden_s = self.slowest_s = 0.0
        self.has_copies = False

    def add(self, measured: Measured) -> None:
        """Add a step."""
        total_s, data_wait_s, forward_s, backward_s, optimizer_s, exposed_s, copy_s, hidden_s = measured
        self.num_steps += 1
        self.total_s += total_s
        self.data_wait_s += data_wait_s
        self.forward_s += forward_s
        self.backward_s += backward_s
        self.optimizer_s += optimizer_s
        if exposed_s is not None:
            self.exposed_s += exposed_s
            self.num_exposed += 1
        if copy_s is not None:
            self.copy_s += copy_s
            self.has_copies = True
        if hidden_s is not None:
            self.hidden_s += hidden_s
            self.num_hidden += 1
        if total_s > self.slowest_s:
            self.slowest_s = total_s

    def means(self) -> dict[str, float | None]:
        """Return the means by the names of `RankFigures`; empty if there was no step."""
        count = self.num_steps
        if not count:
            return {}
        return {
            "step_s": self.total_s / count,
            "slowest_s": self.slowest_s,
            "data_wait_s": self.data_wait_s / count,
            "copy_s": self.copy_s / count if self.has_copies else None,
            "forward_s": self.forward_s / count,
            "backward_s": self.backward_s / count,
            "exposed_s": self.exposed_s / count if self.num_exposed == count else None,
            "hidden_s": self.hidden_s / self.num_hidden if self.num_hidden else None,
            "optimizer_s": self.optimizer_s / count,
        }


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


class Figures:
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

    def step(
        self,
        step: int,
        measured: Measured,
        *,
        interval_s: float | None,
        num_samples: int,
        num_tokens: float | None = None,
        loss: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """Take the step of number ``step``, counted from 0; it lasted ``interval_s`` until the next one began."""
        self.num_done = step + 1
        if self._first.num_steps and not self._whole.num_steps:
            self._sums = Sums()  # the first step says nothing of those that follow
        self._sums.add(measured)
        if not self._first.num_steps:
            self._first.add(measured)
        else:
            self._whole.add(measured)
        self._seconds += measured.total_s if interval_s is None else interval_s
        self._num_samples += num_samples
        if num_tokens is not None:
            self._num_counted += num_tokens
            self._num_counted_samples += num_samples
        if loss is not None:
            self._loss, self._grad_norm, self._rate = loss, grad_norm, learning_rate

    def bucket(self, number: int, size_bytes: int, seconds: float) -> None:
        """Take how long a bucket was on its way."""
        trips = self._trips.setdefault(number, _Trips(size_bytes))
        trips.sum_s += seconds
        trips.least_s, trips.most_s = min(trips.least_s, seconds), max(trips.most_s, seconds)
        trips.count += 1

    def machine(self, line: Mapping[str, Any]) -> None:
        """Take a line of kind ``machine``."""
        self._machine = {name: line.get(name) for name in _MACHINE}

    def event(self, line: Mapping[str, Any]) -> None:
        """Take a line of kind ``event``; ``metrics`` may be in it."""
        names = ("event", "step", "time", "seconds", "text")
        self._events.append(EventFigures(**{name: line[name] for name in names}, metrics=line.get("metrics")))

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
