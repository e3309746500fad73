"""What the buckets of gradients took on their way: pure functions of the timelines of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from lockstep.study.report.lines import Timeline
from lockstep.study.report.read import Recorded


@dataclass(frozen=True)
class Trip:
    """A bucket in one step: its bytes, and the seconds from when the last rank had sent it until it was reduced."""

    step: int
    number: int
    size_bytes: int
    wire_s: float


@dataclass(frozen=True)
class Traffic:
    """The trips of all buckets.

    Args:
        trips: In the order of the steps; of buckets as they were last, not of those that were built anew since.
        num_buckets: Of a step, as they were last.
        sizes_bytes: Theirs, in the order in which they leave.
        median_s: Of a trip.
        slowest: The trip that took longest.
        best_s: By bucket, its fastest trip: what the link is able to do.
        bus_bytes_per_s: At the median, of the largest bucket: 2 (n - 1) / n of its bytes over its time.
    """

    trips: tuple[Trip, ...]
    num_buckets: int
    sizes_bytes: tuple[int, ...]
    median_s: float
    slowest: Trip
    best_s: Mapping[int, float]
    bus_bytes_per_s: float

    @property
    def total_bytes(self) -> int:
        """Of all buckets of a step."""
        return sum(self.sizes_bytes)


def find_traffic(run: Recorded) -> Traffic | None:
    """Return what is known of the buckets' trips; None if they were not recorded."""
    by_step: dict[int, dict[int, Timeline]] = {}
    for rank, record in run.ranks.items():
        for timeline in record.timelines:
            by_step.setdefault(timeline.step, {})[rank] = timeline
    # What a rank's bucket takes from being sent until reduced is waiting for peers and the wire; the shortest is the
    # wire alone, as in [Note: the rank that all wait for].
    trips = []
    for step in sorted(by_step):
        ranks = by_step[step]
        if len(ranks) < len(run.ranks) or len(ranks) < 2:
            continue
        rows = [{bucket.number: bucket for bucket in timeline.buckets} for timeline in ranks.values()]
        for number in sorted(set.intersection(*(set(row) for row in rows))):
            wire_s = min(max(0.0, row[number].done_s - row[number].sent_s) for row in rows)
            trips.append(Trip(step, number, rows[0][number].size_bytes, wire_s))
    if not trips:
        return None
    last = [trip for trip in trips if trip.step == trips[-1].step]
    as_last = {(trip.number, trip.size_bytes) for trip in last}
    trips = [trip for trip in trips if (trip.number, trip.size_bytes) in as_last]
    sizes = tuple(trip.size_bytes for trip in last)
    largest = max(sizes)
    typical_s = median(trip.wire_s for trip in trips if trip.size_bytes == largest)
    num_ranks = len(run.ranks)
    best: dict[int, float] = {}
    for trip in trips:
        best[trip.number] = min(trip.wire_s, best.get(trip.number, trip.wire_s))
    return Traffic(
        trips=tuple(trips),
        num_buckets=len(last),
        sizes_bytes=sizes,
        median_s=median(trip.wire_s for trip in trips),
        slowest=max(trips, key=lambda trip: trip.wire_s),
        best_s=best,
        bus_bytes_per_s=2 * (num_ranks - 1) / num_ranks * largest / typical_s if typical_s > 0 else 0.0,
    )
