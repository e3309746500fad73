"""The gradients of leaves that come one after the other, summed in the tree with as little memory as that takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.tree.layout import Layout, Row
from lockstep.parallel.tree.shape import Tree


class Ladder:
    """Sums leaf after leaf, from left to right; whatever makes a whole node is one row.

    So n leaves take about log2(n) rows and not n. Rows are kept from step to step; those that `take` gave away are to
    be given back.

    Args:
        tree: Of all leaves.
        layout: Of a row.
        device: Where the rows are.
    """

    def __init__(self, tree: Tree, layout: Layout, device: torch.device) -> None:
        self._tree, self._layout, self._device = tree, layout, device
        self._free: list[Row] = []
        self._rungs: list[tuple[range, Row]] = []

    def push(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of the next leaf, one a parameter; None is zero. They are free afterwards."""
        node = range(leaf, leaf + 1)
        parent = self._tree.parent(self._rungs[-1][0], node) if self._rungs else None
        if parent is None:
            row = self._free.pop() if self._free else self._layout.new_row(self._device)
            row.fill(gradients)
        else:
            _, row = self._rungs.pop()
            row.add(gradients)
            node = parent
        while self._rungs and (parent := self._tree.parent(self._rungs[-1][0], node)) is not None:
            _, left = self._rungs.pop()
            left.add_row(row)
            self._free.append(row)
            node, row = parent, left
        self._rungs.append((node, row))

    def take(self) -> dict[range, Row]:
        """Return the sums of what was pushed, by node, and begin anew."""
        rungs, self._rungs = dict(self._rungs), []
        return rungs

    def give_back(self, rows: Sequence[Row]) -> None:
        """Take rows that nobody uses any more, for later leaves."""
        self._free += rows
