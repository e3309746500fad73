"""Which gradients travel together: the plan of the buckets, pure functions of sizes and of the observed ready order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.collectives import Group, all_gather

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
    for deferred in (False, True):
        members = [index for index in order if parameters[index].deferred is deferred]
        part = _cut(parameters, members, caps_bytes)
        base = len(order) if deferred else 0
        finished += [(base + last, spec) for last, spec in part]
    # A bucket is ready when its last gradient is, so that is what orders the launches.
    return tuple(spec for _, spec in sorted(finished, key=lambda item: item[0]))


def _cut(
    parameters: Sequence[ParameterSpec], order: Sequence[int], caps_bytes: Sequence[int]
) -> list[tuple[int, BucketSpec]]:
    """Return buckets with the position of their last parameter in ``order``."""
    finished: list[tuple[int, BucketSpec]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    caps_used: dict[tuple[torch.dtype, torch.device], int] = {}
    position = {index: place for place, index in enumerate(order)}

    def close(members: list[int], size_bytes: int) -> None:
        first = parameters[members[0]]
        spec = BucketSpec(tuple(members), first.dtype, first.device, first.sparse, first.deferred, size_bytes)
        finished.append((position[members[-1]], spec))

    for index in order:
        parameter = parameters[index]
        size_bytes = parameter.numel * parameter.dtype.itemsize
        if parameter.sparse:
            close([index], size_bytes)
            continue
        key = (parameter.dtype, parameter.device)
        open_buckets.setdefault(key, []).append(index)
        sizes_bytes[key] = sizes_bytes.get(key, 0) + size_bytes
        cap_bytes = caps_bytes[min(caps_used.get(key, 0), len(caps_bytes) - 1)]
        if sizes_bytes[key] >= cap_bytes:
            close(open_buckets.pop(key), sizes_bytes.pop(key))
            caps_used[key] = caps_used.get(key, 0) + 1
    for key, members in open_buckets.items():
        close(members, sizes_bytes[key])
    return finished


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
    order = list(reversed(dict.fromkeys(reversed(longest))))
    known = set(order)
    order += [index for index in default if index not in known]
    is_uneven = len({tuple(seen) for seen in arrivals if seen}) > 1
    return ReadyOrder(tuple(order), repeated, is_uneven)


def agree_on_order(
    arrivals: Sequence[int], default: Sequence[int], *, group: Group, device: torch.device
) -> ReadyOrder:
    """Return the order that all ranks use from now on.

    Collective: every rank. Blocks until complete.

    Args:
        arrivals: This rank's arrivals; empty if it had no data.
        default: Every index once, the same on every rank.
        group: The ranks that take part.
        device: Where tensors lie that this group can send.
    """
    lengths = all_gather(torch.tensor([len(arrivals)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.full((longest,), -1, dtype=torch.int64, device=device)
    padded[: len(arrivals)] = torch.tensor(list(arrivals), dtype=torch.int64, device=device)
    gathered = [part.tolist() for part in all_gather(padded, group=group)]
    return merge_arrivals([[index for index in part if index >= 0] for part in gathered], default)
