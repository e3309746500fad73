"""What the ranks tell each other of their virtual shards besides gradients: small, and the same on all afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.comm.collectives import Group, all_gather
from lockstep.parallel.tree.exchange import Placement
from lockstep.train.objective import Part


class Entry(NamedTuple):
    """A virtual shard with samples: how many, and its part of the loss."""

    num_samples: int
    total: float
    out_of: float
    is_mean: bool


@dataclass(frozen=True)
class Table:
    """All virtual shards that have samples, the parameters that received a gradient, and the buffers that changed.

    Args:
        entries: By number of the shard.
        used: For each parameter.
        changed: For each buffer.
    """

    entries: dict[int, Entry]
    used: list[bool]
    changed: list[bool]

    @property
    def sizes(self) -> dict[int, int]:
        """The samples of each shard."""
        return {leaf: entry.num_samples for leaf, entry in self.entries.items()}

    def loss(self, placement: Placement) -> Part:
        """Return the parts of the loss, summed in the tree in float64."""
        nothing = Entry(0, 0.0, 0.0, True)
        entries = [self.entries.get(leaf, nothing) for leaf in placement.tree.root]
        total, count = (
            placement.tree.combine({range(i, i + 1): value for i, value in enumerate(values)}, float.__add__)
            for values in ([entry.total for entry in entries], [entry.out_of for entry in entries])
        )
        is_mean = all(entry.is_mean for entry in entries)
        return Part(torch.tensor(total, dtype=torch.float64), 1.0, count if is_mean else torch.tensor(count).double())


def own_entries(sizes: Mapping[int, int], parts: Mapping[int, Part], device: torch.device) -> dict[int, Entry]:
    """Return the entries of this process's shards. Waits for ``device``, once."""
    if not parts:
        return {}
    values = [
        torch.stack(
            [
                part.value.detach().to(device, torch.float64) * part.weight,
                torch.as_tensor(part.out_of).detach().to(device, torch.float64),
            ]
        )
        for part in parts.values()
    ]
    numbers: list[list[float]] = torch.stack(values).tolist()
    return {
        leaf: Entry(sizes[leaf], total, count, part.is_mean)
        for (leaf, part), (total, count) in zip(parts.items(), numbers, strict=True)
    }


def share_table(mine: Table, placement: Placement, group: Group, device: torch.device) -> Table:
    """Return what all ranks have. Collective: every rank. Blocks until complete.

    Args:
        mine: Of this rank's shards.
        placement: Of the shards over the ranks.
        group: The ranks.
        device: Where the bytes lie while they travel.
    """
    most = max(map(len, placement.ranges))
    rows = torch.zeros(most, 4, dtype=torch.float64)
    for position, leaf in enumerate(placement.ranges[group.rank()]):
        if leaf in mine.entries:
            rows[position] = torch.tensor(mine.entries[leaf], dtype=torch.float64)
    flags = torch.tensor([*mine.used, *mine.changed], dtype=torch.uint8)
    gathered = all_gather(torch.cat([rows.view(torch.uint8).flatten(), flags]).to(device), group=group)
    entries: dict[int, Entry] = {}
    seen = torch.zeros_like(flags)
    for leaves, data in zip(placement.ranges, gathered, strict=True):
        data = data.cpu()
        table = data[: rows.nbytes].view(torch.float64).view(most, 4).tolist()
        entries |= _read(leaves, table)
        seen |= data[rows.nbytes :]
    found = [bool(flag) for flag in seen.tolist()]
    return Table(entries, found[: len(mine.used)], found[len(mine.used) :])


def _read(leaves: Sequence[int], rows: Sequence[Sequence[float]]) -> dict[int, Entry]:
    return {
        leaf: Entry(int(num_samples), total, count, bool(is_mean))
        for leaf, (num_samples, total, count, is_mean) in zip(leaves, rows, strict=False)
        if num_samples
    }
