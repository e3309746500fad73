"""A snapshot as numbers by name: pure functions of it, and the counts of what has happened so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.telemetry.live.snapshot import BucketFigures, EventFigures, Snapshot
from lockstep.telemetry.sinks import names
from lockstep.telemetry.sinks.names import Family

_UNUSUAL = re.compile(r"[^\w.-]", re.ASCII)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: its metrics by name, after so many steps, at a Unix time."""

    step: int
    time: float
    metrics: Mapping[str, float]


class Tally:
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


def scalars(snapshot: Snapshot, tally: Tally) -> dict[str, float]:
    """Return all that is known, by name; evaluations apart, which have a step of their own."""
    found = {metric.name: metric.read(snapshot) for metric in names.METRICS}
    known = {name: float(value) for name, value in found.items() if value is not None}
    for metric in names.RANK_METRICS:
        if (spread := snapshot.spread(metric.figure)) is not None:
            known |= {f"{metric.name}_{each}": float(getattr(spread, each)) for each in names.SPREAD}
    for bucket in snapshot.buckets:
        known |= {name_in(family, bucket.number): value for family, value in of_bucket(bucket)}
    known |= {name_in(names.EVENT_COUNT, event): float(count) for event, count in tally.counts.items()}
    known |= {name_in(names.EVENT_SECONDS, event): seconds for event, seconds in tally.seconds.items()}
    return known


def evaluations(snapshot: Snapshot) -> Iterator[Evaluation]:
    """Give the evaluations since the snapshot before, their metrics by the names that sinks have for them."""
    for event in snapshot.events:
        if event.metrics:
            metrics = {name_in(names.EVALUATION, name): value for name, value in event.metrics.items()}
            yield Evaluation(event.step, event.time, metrics)


def of_bucket(bucket: BucketFigures) -> Iterator[tuple[Family, float]]:
    """Give the figures of a bucket."""
    yield names.BUCKET_LATENCY, bucket.latency_s
    yield names.BUCKET_SPIKE, bucket.spike_s
    yield names.BUCKET_BANDWIDTH, bucket.busbw_bytes_per_s
    yield names.BUCKET_SIZE, float(bucket.size_bytes)


def name_in(family: Family, member: str | int) -> str:
    """Return the name of a figure of ``family``; what no sink takes in a name becomes an underscore."""
    return family.name.replace(f"{{{family.label}}}", _UNUSUAL.sub("_", str(member)))


def has_failed(counts: Mapping[str, int]) -> bool:
    """Return whether a session with these events has not ended in order."""
    return not (counts.get("end") or counts.get("stop"))
