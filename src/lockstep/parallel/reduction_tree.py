"""One binary tree in which the virtual shards' gradients are summed: the same bits on any number of devices.

[Note: the tree]
Floating-point addition is not associative, so the bits of a sum depend on who adds what to what. Here that is fixed:
the gradients of the virtual shards, the *leaves* 0 to n-1, are added in one binary tree, which is a pure function of n.
A *node* is the range of leaves under it. A node of more than one leaf splits after the largest power of two that is
smaller than its size, so that equal parts of a power of two are nodes themselves: each device sums the nodes within its
own leaves (`PairwiseAccumulator`), and only the additions above those are done between devices (`TreeReduction`).

Design: docs/design/reproducible.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from lockstep import activity
from lockstep.comm.collectives import Group, all_gather_flat_async, all_to_all_async
from lockstep.parallel.flat import view_like

T = TypeVar("T")

_ALIGNMENT_BYTES = 512
"""Where each gradient starts: some kernels sum in an order that depends on how the numbers are aligned."""

_CHUNK_BYTES = 25 * 2**20

_EXCHANGE = "exchange of the reduction tree"
"""What the watchdog reports of a rank that waits in it: one name, as one rank may be a chunk ahead of another."""

_MAX_CHUNKS_IN_FLIGHT = 3
"""Chunks that travel at the same time: enough to keep the network busy, and a bound for the memory."""


# --- which additions --------------------------------------------------------------------------------------------------


def split(node: range) -> tuple[range, range]:
    """Return the two children of a node of more than one leaf."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


@dataclass(frozen=True)
class ReductionTree:
    """The tree over ``num_leaves`` leaves; see [Note: the tree]."""

    num_leaves: int

    @property
    def root(self) -> range:
        """The node of all leaves."""
        return range(self.num_leaves)

    def roots(self, leaves: range) -> list[range]:
        """Return the largest nodes that lie within ``leaves``, in order: what can be summed without the others."""

        def within(node: range) -> list[range]:
            if leaves.start <= node.start and node.stop <= leaves.stop:
                return [node]
            if node.stop <= leaves.start or leaves.stop <= node.start:
                return []
            left, right = split(node)
            return within(left) + within(right)

        return within(self.root)

    def parent(self, left: range, right: range) -> range | None:
        """Return the node whose children are ``left`` and ``right``, or None if there is none."""
        return _parents(self.num_leaves).get((left, right))

    def combine(self, parts: Mapping[range, T], add: Callable[[T, T], T], *, root: range | None = None) -> T:
        """Return the sum of all leaves, or of those under ``root``, from nodes that together hold each of them once."""
        node = self.root if root is None else root
        if node in parts:
            return parts[node]
        left, right = split(node)
        return add(self.combine(parts, add, root=left), self.combine(parts, add, root=right))


@lru_cache(maxsize=8)
def _parents(num_leaves: int) -> dict[tuple[range, range], range]:
    parents: dict[tuple[range, range], range] = {}
    nodes = [range(num_leaves)]
    while nodes:
        node = nodes.pop()
        if len(node) > 1:
            children = split(node)
            parents[children] = node
            nodes += children
    return parents


@dataclass(frozen=True)
class LeafPlacement:
    """Who computes which leaves: a contiguous range each, in order, that together are all leaves."""

    ranges: tuple[range, ...]

    def __post_init__(self) -> None:
        assert self.ranges[0].start == 0 and all(left.stop == right.start for left, right in pairwise(self.ranges))

    @property
    def tree(self) -> ReductionTree:
        """The tree over all leaves."""
        return ReductionTree(self.ranges[-1].stop)


# --- where the gradients lie ------------------------------------------------------------------------------------------


class GradientLayout:
    """Flat memory for one gradient of every parameter, laid out the same way whoever sums it.

    The gradients are cut into chunks of about 25 MiB, the last parameters first.

    Args:
        parameters: All on one device.
        multiple_of: What the numel of each chunk divides by: the number of ranks that share its sum.
    """

    def __init__(self, parameters: Sequence[Tensor], *, multiple_of: int = 1) -> None:
        self.parameters = list(parameters)
        self._places: dict[int, tuple[int, int]] = {}  # by parameter, its chunk and where it begins there
        numels: list[int] = []
        dtypes: list[torch.dtype] = []
        open_chunks: dict[torch.dtype, int] = {}
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            padded = _round_up(parameter.numel(), _ALIGNMENT_BYTES // parameter.itemsize)
            chunk = open_chunks.get(parameter.dtype)
            if chunk is None or (numels[chunk] + padded) * parameter.itemsize > _CHUNK_BYTES:
                chunk = open_chunks[parameter.dtype] = len(numels)
                numels.append(0)
                dtypes.append(parameter.dtype)
            self._places[index] = (chunk, numels[chunk])
            numels[chunk] += padded
        self._chunks = [(_round_up(numel, multiple_of), dtype) for numel, dtype in zip(numels, dtypes, strict=True)]

    def new_row(self, device: torch.device) -> GradientRow:
        """Return zeros for every gradient."""
        flats = [torch.zeros(numel, dtype=dtype, device=device) for numel, dtype in self._chunks]
        views = []
        for index, parameter in enumerate(self.parameters):
            chunk, offset = self._places[index]
            views.append(view_like(flats[chunk][offset : offset + parameter.numel()], parameter))
        return GradientRow(flats, views)


@dataclass(frozen=True)
class GradientRow:
    """A gradient of every parameter: ``views[i]`` is that of parameter i, in the memory of one of ``flats``."""

    flats: list[Tensor]
    views: list[Tensor]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of a leaf; None is zero."""
        pairs = [(view, each) for view, each in zip(self.views, gradients, strict=True) if each is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [each for _, each in pairs])
        if missing := self._views_without(gradients):
            torch._foreach_zero_(missing)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a leaf; None is zero."""
        for dtype in {view.dtype for view in self.views}:
            pairs = [
                (view, each)
                for view, each in zip(self.views, gradients, strict=True)
                if each is not None and view.dtype is dtype
            ]
            if pairs:
                torch._foreach_add_([view for view, _ in pairs], [each for _, each in pairs])
        if missing := self._views_without(gradients):
            # -0 + 0 is 0: were it left out, the sign of a zero would tell whether a leaf was added or was the first.
            torch._foreach_add_(missing, 0)

    def add_row(self, other: GradientRow) -> None:
        """Add ``other``, which is on the same device."""
        for flat, addend in zip(self.flats, other.flats, strict=True):
            flat.add_(addend)

    def _views_without(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        return [view for view, each in zip(self.views, gradients, strict=True) if each is None]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- the additions of one device --------------------------------------------------------------------------------------


class PairwiseAccumulator:
    """Sums the gradients of leaf after leaf, from left to right; whatever makes a whole node is one row.

    So n leaves take about log2(n) rows and not n. Rows are kept from step to step; those that `take` gave away are to
    be given back.

    Args:
        tree: Of all leaves.
        layout: Of a row.
        device: Where the rows are.
    """

    def __init__(self, tree: ReductionTree, layout: GradientLayout, device: torch.device) -> None:
        self._tree, self._layout, self._device = tree, layout, device
        self._free: list[GradientRow] = []
        self._pending: list[tuple[range, GradientRow]] = []  # nodes that wait for their right neighbour

    def push(self, leaf: int, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of the next leaf, one for each parameter; None is zero. They are free afterwards."""
        node = range(leaf, leaf + 1)
        parent = self._tree.parent(self._pending[-1][0], node) if self._pending else None
        if parent is None:
            row = self._free.pop() if self._free else self._layout.new_row(self._device)
            row.fill(gradients)
        else:  # a right leaf needs no row of its own
            _, row = self._pending.pop()
            row.add(gradients)
            node = parent
        while self._pending and (parent := self._tree.parent(self._pending[-1][0], node)) is not None:
            _, left = self._pending.pop()
            left.add_row(row)
            self._free.append(row)
            node, row = parent, left
        self._pending.append((node, row))

    def take(self) -> dict[range, GradientRow]:
        """Return the sums of what was pushed, by node, and begin anew."""
        sums, self._pending = dict(self._pending), []
        return sums

    def give_back(self, rows: Sequence[GradientRow]) -> None:
        """Take rows that nobody uses any more, for later leaves."""
        self._free += rows


# --- the additions between devices ------------------------------------------------------------------------------------


class TreeReduction(ABC):
    """Completes the sums of the tree."""

    @abstractmethod
    def sum(self, parts: Sequence[Mapping[range, GradientRow]]) -> GradientRow:
        """Return the sum of all leaves, in the memory of the first row of ``parts``.

        Args:
            parts: For each replica of this process, the sums of the largest nodes within its leaves.
        """


@final
class LocalReduction(TreeReduction):
    """Between the replicas of this process, on the device of the first."""

    def __init__(self, tree: ReductionTree) -> None:
        self._tree = tree

    @override
    def sum(self, parts: Sequence[Mapping[range, GradientRow]]) -> GradientRow:
        """Return the sum of all leaves."""
        rows = {node: row for part in parts for node, row in part.items()}
        first = rows[min(rows, key=lambda node: node.start)]
        for chunk, total in enumerate(first.flats):
            flats = {node: row.flats[chunk].to(total.device) for node, row in rows.items()}
            assert self._tree.combine(flats, Tensor.add_) is total
        return first


@final
class RankReduction(TreeReduction):
    """Between ranks: each receives its slice of everybody's parts, sums it in the tree, and gives it to all.

    Moves as many bytes as an all-reduce does where each rank's leaves make one node.

    Args:
        placement: Of the leaves over the ranks.
        group: The ranks.
    """

    def __init__(self, placement: LeafPlacement, group: Group) -> None:
        self._tree, self._group = placement.tree, group
        self._nodes = [self._tree.roots(leaves) for leaves in placement.ranges]

    @override
    def sum(self, parts: Sequence[Mapping[range, GradientRow]]) -> GradientRow:
        """Return the sum of all leaves. Collective: every rank. Blocks until complete.

        The numel of every chunk divides by the number of ranks.
        """
        (mine,) = parts
        rows = [mine[node] for node in self._nodes[self._group.rank()]]
        scattering: deque[tuple[Tensor, Tensor, Any]] = deque()
        gathering: list[Any] = []

        def sum_oldest() -> None:
            total, received, work = scattering.popleft()
            with activity.waiting(_EXCHANGE):
                work.wait()
            gathering.append(self._sum_slice(received, total))

        # The next chunks travel while one is added; the sums go out while later chunks still come in.
        for flats in zip(*(row.flats for row in rows), strict=True):
            if len(scattering) == _MAX_CHUNKS_IN_FLIGHT:
                sum_oldest()
            scattering.append((flats[0], *self._scatter(flats)))
        while scattering:
            sum_oldest()
        with activity.waiting(_EXCHANGE):
            for work in gathering:
                work.wait()
        return rows[0]

    def _scatter(self, flats: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Start to send each rank its slice of this rank's parts, and to receive this rank's slice of theirs."""
        num_ranks = self._group.size()
        numel = flats[0].numel() // num_ranks
        # What goes to one rank must lie together: its slice of the first node, of the second, and so on.
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

    def _sum_slice(self, received: Tensor, flat: Tensor) -> Any:
        """Sum this rank's slice in the tree and start to give it to all, into ``flat``; return what to wait for."""
        nodes = [node for nodes in self._nodes for node in nodes]
        pieces = dict(zip(nodes, received.chunk(len(nodes)), strict=True))
        total = self._tree.combine(pieces, Tensor.add_)
        return all_gather_flat_async(flat, total, group=self._group)
