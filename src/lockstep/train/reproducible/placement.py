"""Which virtual shards each device computes: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.data.division import Division
from lockstep.data.order import cut, cut_by
from lockstep.errors import ConfigurationError
from lockstep.parallel.tree.exchange import Placement
from lockstep.train.shares import require_as_many


@dataclass(frozen=True)
class VirtualShards:
    """The virtual shards of a global batch, and where they are computed.

    Args:
        placement: Over the ranks if several train together, else over the devices of this process.
        mine: Those of each device of this process.
    """

    placement: Placement
    mine: tuple[range, ...]

    @property
    def division(self) -> Division:
        """How a global batch is divided, and what of it falls to this process."""
        return Division(self.placement.tree.num_leaves, range(self.mine[0].start, self.mine[-1].stop), 1)

    def spread(self, devices: Sequence[torch.device]) -> list[torch.device]:
        """Return the device of each virtual shard of this process."""
        return [device for leaves, device in zip(self.mine, devices, strict=True) for _ in leaves]


def place(num_leaves: int, num_devices: int, proportions: Sequence[float] | None) -> Placement:
    """Return the virtual shards of each device: contiguous, as evenly or by ``proportions`` as they come.

    Raises:
        ConfigurationError: There is none for some device, or a proportion too many or too few.
    """
    if proportions is None:
        ranges = tuple(cut(num_leaves, num_devices, device) for device in range(num_devices))
    else:
        require_as_many(proportions, num_devices)
        ranges = tuple(cut_by(num_leaves, proportions, device) for device in range(num_devices))
    if not all(ranges):
        idle = sum(not leaves for leaves in ranges)
        raise ConfigurationError(
            f"reproducible={num_leaves} leaves {idle} of {num_devices} devices without a virtual shard.\n"
            "Cut the global batch into more, or train on fewer devices."
        )
    return Placement(ranges)


def require_whole_shards(batch_size: int, num_leaves: int) -> None:
    """Check that a global batch divides into virtual shards of one size.

    Raises:
        ConfigurationError: It does not; names the nearest sizes that do.
    """
    if batch_size % num_leaves:
        below = batch_size // num_leaves * num_leaves
        nearest = f"{below} or {below + num_leaves}" if below else f"{num_leaves}"
        raise ConfigurationError(
            f"The global batch of {batch_size} samples does not divide into reproducible={num_leaves} virtual shards.\n"
            f"Set the global batch size to {nearest}."
        )
