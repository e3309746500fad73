"""The last additions of the tree, between those who computed its parts: replicas of one process, or ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.comm.collectives import Group
from lockstep.comm.pieces import all_gather_flat_async, all_to_all_async
from lockstep.parallel.tree.layout import Row
from lockstep.parallel.tree.shape import Tree

_NUM_UNDER_WAY = 3
"""Chunks whose parts travel at the same time: enough to keep the wire busy, and bounds the memory."""


@dataclass(frozen=True)
class Placement:
    """Who computes which leaves: a contiguous range each, in order, that together are all leaves."""

    ranges: tuple[range, ...]

    def __post_init__(self) -> None:
        assert self.ranges[0].start == 0 and all(left.stop == right.start for left, right in pairwise(self.ranges))

    @property
    def tree(self) -> Tree:
        """The tree over all leaves."""
        return Tree(self.ranges[-1].stop)


class Exchange(ABC):
    """Completes the sums of the tree."""

    @abstractmethod
    def sum(self, parts: Sequence[Mapping[range, Row]]) -> Row:
        """Return the sum of all leaves, in the memory of the first row of ``parts``.

        Args:
            parts: For each replica of this process, the sums of the largest nodes within its leaves.
        """


@final
class LocalExchange(Exchange):
    """Between the replicas of this process, on the device of the first."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @override
    def sum(self, parts: Sequence[Mapping[range, Row]]) -> Row:
        """Return the sum of all leaves."""
        rows = {node: row for part in parts for node, row in part.items()}
        first = rows[min(rows, key=lambda node: node.start)]
        for chunk, total in enumerate(first.flats):
            flats = {node: row.flats[chunk].to(total.device) for node, row in rows.items()}
            assert self._tree.combine(flats, Tensor.add_) is total
        return first


@final
class RankExchange(Exchange):
    """Between ranks: each receives its slice of everybody's parts, sums it in the tree, and hands it to all.

    Moves as many bytes as an all-reduce does where each rank's leaves make one node.

    Args:
        placement: Of the leaves over the ranks.
        group: The ranks.
    """

    def __init__(self, placement: Placement, group: Group) -> None:
        self._placement, self._group = placement, group
        self._nodes = [placement.tree.roots(leaves) for leaves in placement.ranges]

    @override
    def sum(self, parts: Sequence[Mapping[range, Row]]) -> Row:
        """Return the sum of all leaves. Collective: every rank. Blocks until complete.

        The numel of every chunk divides by the number of ranks.
        """
        (mine,) = parts
        rows = [mine[node] for node in self._nodes[self._group.rank()]]
        under_way: deque[tuple[Tensor, Any]] = deque()
        handing_out: list[Any] = []
        totals = iter(rows[0].flats)

        def sum_oldest() -> None:
            received, work = under_way.popleft()
            work.wait()
            handing_out.append(self._share(received, next(totals)))

        for flats in zip(*(row.flats for row in rows), strict=True):
            if len(under_way) == _NUM_UNDER_WAY:
                sum_oldest()
            under_way.append(self._send(flats))
        while under_way:
            sum_oldest()
        for work in handing_out:
            work.wait()
        return rows[0]

    def _send(self, flats: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Start to send each rank its slice of my parts, and to receive my slice of theirs."""
        num_ranks = self._group.size()
        numel = flats[0].numel() // num_ranks
        sent = flats[0] if len(flats) == 1 else torch.stack([flat.view(num_ranks, numel) for flat in flats], dim=1)
        received = flats[0].new_empty(numel * sum(map(len, self._nodes)))
        work = all_to_all_async(
            received,
            sent.reshape(-1),
            output_sizes=[numel * len(nodes) for nodes in self._nodes],
            input_sizes=[numel * len(flats)] * num_ranks,
            group=self._group,
        )
        return received, work

    def _share(self, received: Tensor, flat: Tensor) -> Any:
        """Sum my slice in the tree and start to hand it to all, into ``flat``; return what to wait for."""
        nodes = [node for nodes in self._nodes for node in nodes]
        pieces = dict(zip(nodes, received.chunk(len(nodes)), strict=True))
        total = self._placement.tree.combine(pieces, Tensor.add_)
        return all_gather_flat_async(flat, total, group=self._group)
