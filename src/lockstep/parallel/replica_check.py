"""Do all ranks still hold the same bits? If not: the first tensor that differs, where in it, and who is on which side.

[Note: cost]
All is one checksum, and the ranks exchange that number alone. Only if it differs does each tensor get a checksum of its
own, to be compared by name, and only of the first one that differs are the elements exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_gather, all_gather_object, broadcast
from lockstep.errors import ReplicasDiffer
from lockstep.parallel.checksum import checksum
from lockstep.parallel.replica import Replica

Sides = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Difference:
    """What differs, the same on every rank.

    Args:
        name: The first tensor that does.
        sides: The ranks that agree on it, the largest side first; of equals, that of the first rank.
        where: The elements of it, in a sentence; None if shapes differ.
        num_different: How many tensors differ.
        num_all: How many were compared.
    """

    name: str
    sides: Sides
    where: str | None
    num_different: int
    num_all: int

    def error(self, *, now: str, since: str) -> ReplicasDiffer:
        """Return the error that names it.

        Args:
            now: When it was found, in words.
            since: When the ranks were alike, as a sentence.
        """
        number = f"{self.num_different} of {self.num_all} tensors differ{'s' * (self.num_different == 1)}."
        lines = [
            f"The ranks do not hold the same bits any more{now}: {self.name} differs {between(self.sides)}.",
            *([] if self.where is None else [self.where]),
            f"{number} {since}",
            "Either code changed it on some ranks only (an if on the rank, a buffer that nobody synchronises), or a "
            "device or its memory is faulty. Go on from a checkpoint that was written before.",
        ]
        return ReplicasDiffer("\n".join(lines), tensor=self.name, sides=self.sides)


def between(sides: Sides) -> str:
    """Return who differs from whom: the smaller sides from the largest, if there is one."""
    if len(sides) == 2 and len(sides[0]) == len(sides[1]):
        return f"between {_ranks(sides[0])} and {_ranks(sides[1])}"
    if len(sides[0]) == 1:
        return f"on all of ranks {_listed([rank for side in sides for rank in side])}"
    return f"on {' and on '.join(map(_ranks, sides[1:]))} from that on {_ranks(sides[0])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def find_difference(replica: Replica, *, group: Group, device: torch.device) -> Difference | None:
    """Return what differs between the ranks, None if nothing does.

    Collective: every rank. Blocks; one exchange of 8 bytes if nothing differs.

    Args:
        replica: What this rank holds.
        group: The ranks.
        device: Where tensors lie that the ranks can exchange.
    """
    numbers = torch.tensor(list(replica.numbers.values()), dtype=torch.float64)
    total = checksum([*replica.tensors.values(), numbers] if replica.numbers else list(replica.tensors.values()))
    totals = [int(each) for each in all_gather(torch.tensor([total], device=device), group=group)]
    if len(set(totals)) == 1:
        return None
    mine = dict(replica.all())
    cards = {name: [checksum([tensor]), list(tensor.shape), str(tensor.dtype)] for name, tensor in mine.items()}
    ranks: list[dict[str, Any]] = all_gather_object(cards, group=group, device=device)
    names = list(dict.fromkeys(name for cards in sorted(ranks, key=len, reverse=True) for name in cards))
    different = [name for name in names if any(cards.get(name) != ranks[0].get(name) for cards in ranks)]
    if not different:  # the same tensors in another order
        different = names
    first = different[0]
    sides = sides_of([str(cards.get(first)) for cards in ranks])
    where = None
    if len({str(cards.get(first, [None, None])[1:]) for cards in ranks}) == 1:
        where = _describe(mine[first], sides, group=group, device=device)
    return Difference(first, sides, where, len(different), len(names))


def sides_of(values: Sequence[str]) -> Sides:
    """Return the ranks with the same value, the largest side first; of equals, that of the first rank."""
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, sides.values()), key=lambda side: (-len(side), side[0])))


def _describe(tensor: Tensor, sides: Sides, *, group: Group, device: torch.device) -> str | None:
    """Return where in a tensor the second side differs from the first. Collective: every rank."""
    if len(sides) < 2:
        return None
    mine = tensor.detach().contiguous()
    theirs = mine.to(device, copy=True)
    broadcast(theirs, group=group, src=sides[0][0])
    found: list[Mapping[str, Any]] = all_gather_object(
        compare(mine, theirs.to(mine.device)), group=group, device=device
    )
    other, one = sides[1][0], sides[0][0]
    seen = found[other]
    bits = ", by one bit" * seen["one_bit"]
    many = f"{seen['count']} of its {mine.numel()} elements differ{'s' * (seen['count'] == 1)}{bits}"
    at = f" at {seen['index']}" if mine.dim() else ""
    return f"{many}: the first{at} is {seen['mine']} on rank {other} and {seen['theirs']} on rank {one}."


def compare(mine: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Return how many elements differ in their bits, whether it is a single bit, and the first of them.

    Args:
        mine: Contiguous.
        theirs: Of the same shape and dtype.
    """
    bytes_of = [each.reshape(-1).view(torch.uint8).view(mine.numel(), -1) for each in (mine, theirs)]
    changed = torch.bitwise_xor(*bytes_of)
    places = changed.any(dim=1).nonzero().flatten().tolist()
    first = places[0] if places else 0
    flipped = changed[changed != 0].tolist()
    index = torch.unravel_index(torch.tensor(first), mine.shape) if mine.dim() else ()
    return {
        "count": len(places),
        "one_bit": len(flipped) == 1 and flipped[0].bit_count() == 1,
        "index": [int(each) for each in index],
        "mine": str(mine.reshape(-1)[first].item()),
        "theirs": str(theirs.reshape(-1)[first].item()),
    }
