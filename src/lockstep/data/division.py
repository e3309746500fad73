"""Which part of a global batch is whose: shares for the devices, micro-batches of a share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.data.order import cut, cut_by


@dataclass(frozen=True)
class Division:
    """How a global batch is divided: over ``num_shares`` devices, each share into ``accumulate`` micro-batches.

    Args:
        shares: Those that this process computes.
        proportions: How large the shares are to each other, a positive number for each; all the same if None.
    """

    num_shares: int
    shares: range
    accumulate: int
    proportions: Sequence[float] | None = None

    def positions(self, size: int, share: int) -> range:
        """Return the positions, among ``size`` things in a row, of those that fall to ``share``."""
        if self.proportions is None:
            return cut(size, self.num_shares, share)
        return cut_by(size, self.proportions, share)

    def positions_here(self, size: int) -> range:
        """Return the positions, among ``size`` things in a row, of those that fall to this process: contiguous too."""
        return range(self.positions(size, self.shares[0]).start, self.positions(size, self.shares[-1]).stop)

    def all_have_samples(self, size: int, micro: int) -> bool:
        """Return whether each share has samples in micro-batch ``micro`` of a global batch of ``size``."""
        first = self.num_shares - 1 if self.proportions is None else 0  # of equals, the last is the smallest
        shares = range(first, self.num_shares)
        return all(len(cut(len(self.positions(size, share)), self.accumulate, micro)) > 0 for share in shares)

    def micro_batches(self, batch: Tensor) -> list[dict[int, list[int]]]:
        """Return the indices of each micro-batch of this process, by number of share; empty shares are left out."""
        micro_batches: list[dict[int, list[int]]] = [{} for _ in range(self.accumulate)]
        for share in self.shares:
            positions = self.positions(len(batch), share)
            mine = batch[positions.start : positions.stop].tolist()
            for micro, shares in enumerate(micro_batches):
                part = cut(len(mine), self.accumulate, micro)
                if part:
                    shares[share] = mine[part.start : part.stop]
        return micro_batches
