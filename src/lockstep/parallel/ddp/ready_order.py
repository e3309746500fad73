"""What the first synchronised backward teaches: the order in which gradients arrive, agreed by all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.collectives import Group, all_gather


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
