"""Which gradients travel together: the plan of the buckets, pure functions of sizes and of the observed ready order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIB = 2**20
DEFAULT_CAP_BYTES = 25 * MIB
FIRST_CAP_BYTES = 1 * MIB  # small, so that communication starts early


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan needs to know of a parameter. ``deferred``: it may receive several gradients in one backward."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    deferred: bool = False


@dataclass(frozen=True)
class BucketSpec:
    """The parameters of one bucket, by index, in the order in which their gradients lie."""

    parameters: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool
    deferred: bool
    size_bytes: int


def plan_buckets(
    parameters: Sequence[ParameterSpec], order: Sequence[int], caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Cut ``order`` into buckets of one dtype and device; a pure function.

    Args:
        parameters: All parameters, by index.
        order: Every index once, in the order in which gradients are expected.
        caps_bytes: A bucket closes when it holds this many bytes: one cap per bucket, the last for all that follow.

    Returns:
        The buckets in the order in which they are launched. Those of deferred parameters come last.
    """
    finished: list[tuple[int, BucketSpec]] = []
    # By what the members have in common: buckets of several dtypes fill side by side, each kind with all the caps.
    open_buckets: dict[object, list[int]] = defaultdict(list)
    size_bytes: Counter[object] = Counter()
    num_closed: Counter[object] = Counter()
    order = sorted(order, key=lambda index: parameters[index].deferred)  # stable
    position = {index: place for place, index in enumerate(order)}

    def close(key: object) -> None:
        members = open_buckets.pop(key)
        first = parameters[members[0]]
        kind = first.dtype, first.device, first.sparse, first.deferred
        # A bucket is ready when its last gradient is, so that is what orders the launches.
        finished.append((position[members[-1]], BucketSpec(tuple(members), *kind, size_bytes.pop(key))))
        num_closed[key] += 1

    for index in order:
        each = parameters[index]
        key = (each.dtype, each.device, each.deferred, index if each.sparse else None)  # each sparse one on its own
        open_buckets[key].append(index)
        size_bytes[key] += each.numel * each.dtype.itemsize
        if size_bytes[key] >= caps_bytes[min(num_closed[key], len(caps_bytes) - 1)]:
            close(key)
    for left in list(open_buckets):
        close(left)
    return tuple(spec for _, spec in sorted(finished, key=lambda item: item[0]))


@dataclass(frozen=True)
class ReadyOrder:
    """Every parameter's index once, in the order of arrival, and those that arrived more than once.

    Attributes:
        is_uneven: Whether ranks that had data saw different things.
    """

    order: tuple[int, ...]
    repeated: frozenset[int]
    is_uneven: bool = False


def merge_arrivals(arrivals: Sequence[Sequence[int]], default: Sequence[int]) -> ReadyOrder:
    """Combine what each rank saw into one order; a pure function.

    Args:
        arrivals: By rank, the indices of the parameters as their gradients arrived, repeats included.
        default: Every index once; the place of parameters that the chosen rank did not see.

    Returns:
        The order of the rank that saw most parameters (the lowest such rank), completed from ``default``.
        A parameter that arrived twice on any rank counts as repeated, and its last arrival is its place.
    """
    repeated = frozenset(index for seen in arrivals for index, count in Counter(seen).items() if count > 1)
    longest = max(arrivals, key=lambda seen: len(set(seen)))
    last_arrivals = list(dict.fromkeys(reversed(longest)))[::-1]
    order = tuple(dict.fromkeys([*last_arrivals, *default]))
    return ReadyOrder(order, repeated, is_uneven=len({tuple(seen) for seen in arrivals if seen}) > 1)
