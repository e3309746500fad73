"""What the rules of advice need to know of a run, and what an advice is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.study.report.together import Parts
from lockstep.telemetry.stragglers import Straggler

WORTH = 1.03
"""A gain below this is not worth a sentence."""


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of a run; see `Figures` and `Traffic`.

    Args:
        num_ranks: Devices with a process each.
        device: ``cpu`` or ``cuda``.
        num_hosts: Machines that they are on.
        critical: Where the time of a step goes along the critical path.
        computing_s: Of all ranks together in a step: forward and backward; None: what the critical path has, each.
        straggler: A rank that keeps the others waiting in every step.
        workers: Loader processes a rank; None if not known.
        num_buckets: In which gradients travel; 0 if not known.
        bucket_latency_s: Of a bucket's trip, however small: at most the fastest one's.
        trip_s: Of a bucket's trip: the median.
        best_trip_s: The same of each bucket's fastest trip.
        load_per_core: How many threads wanted to run for each core of the machine; None if not known.
        gradient_bytes: All together.
        wire: Whether gradients are rounded for their way already.
        strategy: Who computes.
        accumulate: Micro-batches a step.
        paused_share: What training stood still for checkpoints and evaluations, as a share of the whole run, by event.
        cores: Of the machine; None if not known. On CPUs all ranks share them.
        busy_cores: How many of them the ranks used, all together; None if not known.
        global_batch_size: Samples of a step; None if not known.
        precision: In which it computes.
        bf16_speed: How many times as fast as now the device computes a layer in bf16; None if that was not measured.
        pinned: Whether a script's loader gives samples in page-locked memory; None if not known, and for `fit`.
    """

    num_ranks: int
    device: str
    critical: Parts
    computing_s: float | None = None
    straggler: Straggler | None = None
    workers: int | None = None
    num_buckets: int = 0
    bucket_latency_s: float = 0.0
    trip_s: float = 0.0
    best_trip_s: float = 0.0
    load_per_core: float | None = None
    num_hosts: int = 1
    gradient_bytes: int = 0
    wire: bool = False
    strategy: str = "ddp"
    accumulate: int = 1
    paused_share: Mapping[str, float] | None = None
    cores: int | None = None
    busy_cores: float | None = None
    global_batch_size: int | None = None
    precision: str = "fp32"
    bf16_speed: float | None = None
    pinned: bool | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.critical.total_s

    @property
    def computing(self) -> float:
        """Seconds of forward and backward along the critical path."""
        return self.critical.forward_s + self.critical.backward_s

    def gain(self, saved_s: float) -> float:
        """Return the throughput if a step were so much shorter, over that of now."""
        return self.step_s / (self.step_s - min(saved_s, 0.95 * self.step_s))

    def share(self, seconds: float) -> str:
        """Return a part of a step in words."""
        return f"{seconds / self.step_s:.0%}"

    def is_one_ranks(self, phase: str) -> bool:
        """Return whether a phase is slow on one rank only, which another rule says."""
        return self.straggler is not None and self.straggler.phase == phase


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Args:
        cause: What was measured.
        change: What to do.
        gain: The throughput then over that of now, as predicted.
        keeps_run: Whether it stays the same training run; a larger batch is another one.
        at_most: Whether the gain is a bound, of which only trying tells how much is to be had.
        settings: The change as settings of a run, by name; None as a value is the default. Empty if it is none.
    """

    cause: str
    change: str
    gain: float
    keeps_run: bool = True
    at_most: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All in one sentence."""
        about = "at most" if self.at_most else "about"
        return f"{self.cause}: {self.change} would give {about} {self.gain:.2f} times the throughput."


def milliseconds(seconds: float) -> str:
    """Return a duration in words."""
    found = 1e3 * seconds
    return f"{found:.0f} ms" if found >= 10 else f"{found:.1f} ms"
