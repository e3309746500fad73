"""When communication would end with other buckets: pure functions of what was measured.

[Note: the model of a step]
Backward makes one gradient after the other ready. A bucket leaves when its last gradient is ready and all buckets
before it have left, which takes the host ``launch_s``. The network (or the memory) carries one bucket at a time, each
for ``latency_s + bytes / bytes_per_s``; all but the last are handed to another thread, which takes ``handover_s``.
Where that happens during backward it takes something away from it: of its time only the part ``hidden`` is free, for
the rest backward has to wait. On a GPU nearly all is free; on a CPU whose cores are all busy with backward nothing is,
for it is cores that copy and add, and both take longer than one after the other (``hidden`` below 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.parallel.ddp.bucket_plan import MIB, BucketSpec

_SMALLEST_CAP_BYTES = 2**15
MIN_GAIN = 0.02
"""Other buckets must promise this part of backward and communication, or they stay as they are."""


@dataclass(frozen=True)
class Costs:
    """What was measured of a group.

    Attributes:
        latency_s: Of an all-reduce, however small.
        bytes_per_s: What it carries beyond that.
        launch_s: How long the host is busy with starting one.
        hidden: Which part of an all-reduce costs nothing while backward runs, at most 1; below 0 if it costs extra.
        handover_s: What an all-reduce takes longer that another thread carries out.
    """

    latency_s: float
    bytes_per_s: float
    launch_s: float
    hidden: float
    handover_s: float = 0.0

    def carry_s(self, size_bytes: float) -> float:
        """Return how long an all-reduce of so many bytes takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Timeline:
    """When gradients are ready in a backward that nothing disturbs.

    Attributes:
        ready_s: By parameter, seconds since the first gradient.
        end_s: When the last is ready.
    """

    ready_s: tuple[float, ...]
    end_s: float


def fit_line(samples: Mapping[int, float]) -> tuple[float, float]:
    """Return latency and bytes a second of the line through seconds by size; a pure function.

    The smallest size is nearly all latency, the others tell the slope: the median over them, so that one outlier among
    the measurements does not matter.
    """
    (smallest_bytes, smallest_s), *others = sorted(samples.items())
    slopes = [(seconds - smallest_s) / (size_bytes - smallest_bytes) for size_bytes, seconds in others]
    slope = max(median(slopes), 1e-13) if slopes else 1e-13  # 10 TB/s: noise made it negative
    return max(smallest_s - slope * smallest_bytes, 1e-7), 1 / slope


def predict_end_s(plan: Sequence[BucketSpec], timeline: Timeline, costs: Costs, *, width: float = 1.0) -> float:
    """Return when backward and communication are over, in seconds since the first gradient; a pure function.

    Args:
        plan: The buckets in the order in which they leave.
        timeline: When gradients are ready.
        costs: What was measured.
        width: Bytes that travel for each byte of a gradient.
    """
    delay_s = left_s = free_s = 0.0
    for position, spec in enumerate(plan):
        ready_s = timeline.end_s if spec.deferred else max(timeline.ready_s[index] for index in spec.parameters)
        left_s = max(left_s, ready_s + delay_s) + costs.launch_s
        if ready_s < timeline.end_s:
            delay_s += costs.launch_s
        started_s = max(left_s, free_s)
        is_last = position == len(plan) - 1
        free_s = started_s + costs.carry_s(spec.size_bytes * width) + (0.0 if is_last else costs.handover_s)
        during_backward_s = min(free_s, timeline.end_s + delay_s) - started_s
        delay_s += (1 - costs.hidden) * max(during_backward_s, 0.0)
    return max(timeline.end_s + delay_s, free_s)


def candidate_caps(total_bytes: int, first_cap_bytes: int) -> list[tuple[int, ...]]:
    """Return caps to try: one bucket, and ever smaller ones, with and without a small first one."""
    caps: list[tuple[int, ...]] = []
    size_bytes = max(total_bytes, _SMALLEST_CAP_BYTES)
    while size_bytes >= _SMALLEST_CAP_BYTES:
        caps.append((size_bytes,))
        if size_bytes > first_cap_bytes:
            caps.append((first_cap_bytes, size_bytes))
        size_bytes = int(size_bytes / 2**0.5)
    return caps


def in_words(plan: Sequence[BucketSpec]) -> str:
    """Describe buckets by their number and sizes."""
    sizes = [spec.size_bytes / MIB for spec in plan]
    if len(sizes) == 1:
        return f"1 bucket of {sizes[0]:.3g} MiB"
    return f"{len(sizes)} buckets of {min(sizes):.3g} to {max(sizes):.3g} MiB"
