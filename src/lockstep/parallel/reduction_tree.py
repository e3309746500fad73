"""One binary tree in which the virtual shards' gradients are summed: the same bits on any number of devices."""

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

from lockstep.comm.collectives import Group, all_gather_flat_async, all_to_all_async
from lockstep.parallel.flat import view_like

# The binary tree in which the leaves 0 to n-1 are summed: a pure function of n.
#
# A node is the range of leaves under it. A node of more than one leaf splits after the largest power of two that is
# smaller than its size, so that equal parts of a power of two are nodes themselves, whoever computes them.

T = TypeVar("T")


def split(node: range) -> tuple[range, range]:
    """Return the two children of a node of more than one leaf."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


@dataclass(frozen=True)
class ReductionTree:
    """The tree over ``num_leaves`` leaves."""

    num_leaves: int

    @property
    def root(self) -> range:
        """The node of all leaves."""
        return range(self.num_leaves)

    def roots(self, leaves: range) -> list[range]:
        """Return the largest nodes that lie within ``leaves``, in order: what can be summed without the others."""
        return _within(self.root, leaves)

    def parent(self, left: range, right: range) -> range | None:
        """Return the node whose children are ``left`` and ``right``, or None if there is none."""
        return _parents(self.num_leaves).get((left, right))

    def combine(self, parts: Mapping[range, T], add: Callable[[T, T], T], *, root: range | None = None) -> T:
        """Return the sum of all leaves, or of those under ``root``, from nodes that together hold each of them once."""
        return _combine(self.root if root is None else root, parts, add)


def _within(node: range, leaves: range) -> list[range]:
    if leaves.start <= node.start and node.stop <= leaves.stop:
        return [node]
    if node.stop <= leaves.start or leaves.stop <= node.start:
        return []
    left, right = split(node)
    return _within(left, leaves) + _within(right, leaves)


def _combine(node: range, parts: Mapping[range, T], add: Callable[[T, T], T]) -> T:
    if node in parts:
        return parts[node]
    left, right = split(node)
    return add(_combine(left, parts, add), _combine(right, parts, add))


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


# Flat memory for one gradient of every parameter, laid out the same way whoever sums it.

_ALIGNMENT_BYTES = 512
"""Where each gradient starts: some kernels sum in an order that depends on how the numbers are aligned."""

_CHUNK_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient lies."""

    chunk: int
    offset: int


@dataclass(frozen=True)
class _Chunk:
    """One flat buffer: gradients of one dtype on one device."""

    numel: int
    dtype: torch.dtype


class GradientLayout:
    """Cuts the gradients of ``parameters`` into chunks of about 25 MiB, the last parameters first.

    Args:
        parameters: All on one device.
        multiple_of: What the numel of each chunk divides by: the number of ranks that share its sum.
    """

    def __init__(self, parameters: Sequence[Tensor], *, multiple_of: int = 1) -> None:
        self.parameters = list(parameters)
        self._places: list[_Place] = [_Place(0, 0)] * len(self.parameters)
        sizes: list[list[int]] = []
        dtypes: list[torch.dtype] = []
        open_chunks: dict[torch.dtype, int] = {}
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            padded = _round_up(parameter.numel(), _ALIGNMENT_BYTES // parameter.itemsize)
            chunk = open_chunks.get(parameter.dtype)
            if chunk is None or (sum(sizes[chunk]) + padded) * parameter.itemsize > _CHUNK_BYTES:
                chunk = open_chunks[parameter.dtype] = len(sizes)
                sizes.append([])
                dtypes.append(parameter.dtype)
            self._places[index] = _Place(chunk, sum(sizes[chunk]))
            sizes[chunk].append(padded)
        self._chunks = [
            _Chunk(_round_up(sum(size), multiple_of), dtype) for size, dtype in zip(sizes, dtypes, strict=True)
        ]

    def new_row(self, device: torch.device) -> GradientRow:
        """Return zeros for every gradient."""
        flats = [torch.zeros(chunk.numel, dtype=chunk.dtype, device=device) for chunk in self._chunks]
        views = [
            view_like(flats[place.chunk][place.offset : place.offset + parameter.numel()], parameter)
            for place, parameter in zip(self._places, self.parameters, strict=True)
        ]
        return GradientRow(flats, views)


@dataclass(frozen=True)
class GradientRow:
    """A gradient of every parameter: ``views[i]`` is that of parameter i, in the memory of one of ``flats``."""

    flats: list[Tensor]
    views: list[Tensor]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of a leaf; None is zero."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        missing = [self.views[index] for index, gradient in enumerate(gradients) if gradient is None]
        if present:
            torch._foreach_copy_([self.views[index] for index in present], _present(gradients))
        if missing:
            torch._foreach_zero_(missing)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a leaf; None is zero, which is added too: it makes 0 of -0, as a row of zeros does."""
        for dtype in {view.dtype for view in self.views}:
            present = [i for i, g in enumerate(gradients) if g is not None and self.views[i].dtype is dtype]
            if present:
                torch._foreach_add_([self.views[i] for i in present], _present([gradients[i] for i in present]))
        missing = [self.views[index] for index, gradient in enumerate(gradients) if gradient is None]
        if missing:
            torch._foreach_add_(missing, 0)

    def add_row(self, other: GradientRow) -> None:
        """Add ``other``, which is on the same device."""
        for flat, addend in zip(self.flats, other.flats, strict=True):
            flat.add_(addend)


def _present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# The gradients of leaves that come one after the other, summed in the tree with as little memory as that takes.


class PairwiseAccumulator:
    """Sums leaf after leaf, from left to right; whatever makes a whole node is one row.

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
        self._rungs: list[tuple[range, GradientRow]] = []

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

    def take(self) -> dict[range, GradientRow]:
        """Return the sums of what was pushed, by node, and begin anew."""
        rungs, self._rungs = dict(self._rungs), []
        return rungs

    def give_back(self, rows: Sequence[GradientRow]) -> None:
        """Take rows that nobody uses any more, for later leaves."""
        self._free += rows


# The last additions of the tree, between those who computed its parts: replicas of one process, or ranks.

_NUM_UNDER_WAY = 3
"""Chunks whose parts travel at the same time: enough to keep the wire busy, and bounds the memory."""


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
    """Between ranks: each receives its slice of everybody's parts, sums it in the tree, and hands it to all.

    Moves as many bytes as an all-reduce does where each rank's leaves make one node.

    Args:
        placement: Of the leaves over the ranks.
        group: The ranks.
    """

    def __init__(self, placement: LeafPlacement, group: Group) -> None:
        self._placement, self._group = placement, group
        self._nodes = [placement.tree.roots(leaves) for leaves in placement.ranges]

    @override
    def sum(self, parts: Sequence[Mapping[range, GradientRow]]) -> GradientRow:
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
