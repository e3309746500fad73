"""One binary tree that sums the virtual shards' gradients: the same bits on any number of devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.base.containers import in_chunks
from lockstep.base.torch_internals import foreach_add_, foreach_copy_, foreach_zero_
from lockstep.comm.collectives import Group, Work, all_gather_flat, all_to_all_async, wait_for
from lockstep.parallel.flat import view_like

T = TypeVar("T")

# The alignment of each gradient: the order in which some kernels sum depends on it.
_ALIGNMENT_BYTES = 512

_CHUNK_BYTES = 25 * 2**20

# The watchdog's name for a wait in it. There is one name for all chunks, as one rank may be a chunk ahead of another.
_EXCHANGE = "exchange of the reduction tree"

# Chunks in flight at the same time: enough to keep the network busy, and a limit for the memory.
_MAX_CHUNKS_IN_FLIGHT = 3


# --- Which additions


def split(node: range) -> tuple[range, range]:
    """Return the two children of a node of more than one leaf."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


@dataclass(frozen=True)
class ReductionTree:
    """The tree over ``num_leaves`` leaves; see [Note: the tree].

    [Note: the tree]
    Floating-point addition is not associative, so the bits of a sum depend on the order of the additions. Here the
    order is fixed: the gradients of the virtual shards, the *leaves* 0 to n-1, are added in one binary tree, which is a
    pure function of n. A *node* is the range of leaves under it. A node of more than one leaf splits after the largest
    power of two that is smaller than its size, so that equal parts of a power of two are nodes themselves. Each device
    sums the nodes within its own leaves (`PairwiseAccumulator`), and only the remaining additions above them run
    between devices (`TreeReduction`).
    """

    num_leaves: int

    @property
    def root(self) -> range:
        """The node of all leaves."""
        return range(self.num_leaves)

    def roots(self, leaves: range) -> list[range]:
        """Return the largest nodes within ``leaves``, in order: the sums that need no other leaves."""

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
        node = self.root
        while len(node) > 1:
            children = split(node)
            if children == (left, right):
                return node
            node = children[0] if left.start < children[1].start else children[1]
        return None

    def combine(self, parts: Mapping[range, T], add: Callable[[T, T], T], *, root: range | None = None) -> T:
        """Return the sum of all leaves, or of those under ``root``, from nodes that together hold each of them once."""
        node = self.root if root is None else root
        if node in parts:
            return parts[node]
        left, right = split(node)
        return add(self.combine(parts, add, root=left), self.combine(parts, add, root=right))

    def total(self, numbers: Sequence[float]) -> float:
        """Return the sum of a number for each leaf."""
        return self.combine({range(leaf, leaf + 1): number for leaf, number in enumerate(numbers)}, float.__add__)


@dataclass(frozen=True)
class LeafPlacement:
    """Which device computes which leaves: a contiguous range each, in order, together all leaves."""

    ranges: tuple[range, ...]

    @property
    def tree(self) -> ReductionTree:
        """The tree over all leaves."""
        return ReductionTree(self.ranges[-1].stop)


# --- Where the gradients lie


class GradientLayout:
    """Flat memory for one gradient of every parameter, with the same layout on every device.

    The gradients are cut into chunks of about 25 MiB, the last parameters first.

    Args:
        parameters: All on one device.
        multiple_of: The numel of each chunk is a multiple of it: the number of ranks that share the sum.
    """

    def __init__(self, parameters: Sequence[Tensor], *, multiple_of: int = 1) -> None:
        self.parameters = list(parameters)
        self._places: dict[int, tuple[int, int]] = {}  # by parameter, its chunk and where it begins there
        self._chunks: list[tuple[int, torch.dtype]] = []
        dtypes = [parameter.dtype for parameter in self.parameters]
        padded_bytes = [_round_up(parameter.nbytes, _ALIGNMENT_BYTES) for parameter in self.parameters]
        last_first = reversed(range(len(dtypes)))  # as backward fills them
        for members in in_chunks(last_first, dtypes.__getitem__, padded_bytes.__getitem__, _CHUNK_BYTES):
            dtype, start = dtypes[members[0]], 0
            for index in members:
                self._places[index] = len(self._chunks), start
                start += padded_bytes[index] // dtype.itemsize
            # Every rank reduces an equal slice of each chunk.
            self._chunks.append((_round_up(start, multiple_of), dtype))

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

    def put(self, gradients: Sequence[Tensor | None], *, adds: bool) -> None:
        """Set the gradients of a leaf, or add them; None is zero."""
        pairs = [(view, gradient) for view, gradient in zip(self.views, gradients, strict=True) if gradient is not None]
        missing = [view for view, gradient in zip(self.views, gradients, strict=True) if gradient is None]
        if pairs:
            put = foreach_add_ if adds else foreach_copy_
            put([view for view, _ in pairs], [gradient for _, gradient in pairs])
        if missing and adds:
            # -0 + 0 is 0. Without this addition, the sign of a zero would depend on whether the leaf was the first.
            foreach_add_(missing, 0)
        elif missing:
            foreach_zero_(missing)

    def add_row(self, other: GradientRow) -> None:
        """Add ``other``, which is on the same device."""
        for flat, addend in zip(self.flats, other.flats, strict=True):
            flat.add_(addend)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- The additions of one device


class PairwiseAccumulator:
    """Sums the gradients of leaves from left to right; complete nodes are merged into one row.

    So n leaves need about log2(n) rows instead of n. Rows are reused in later steps; the caller of `take` returns them
    with `give_back`.

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
        """Add the gradients of the next leaf, one per parameter; None is zero. The caller may reuse them afterwards."""
        node = range(leaf, leaf + 1)
        parent = self._tree.parent(self._pending[-1][0], node) if self._pending else None
        if parent is None:
            # Overwritten without zeroing first: a reused row costs one pass.
            row = self._free.pop() if self._free else self._layout.new_row(self._device)
            row.put(gradients, adds=False)
        else:  # a right leaf needs no separate row
            _, row = self._pending.pop()
            row.put(gradients, adds=True)
            node = parent
        while self._pending and (parent := self._tree.parent(self._pending[-1][0], node)) is not None:
            _, left_row = self._pending.pop()
            left_row.add_row(row)
            self._free.append(row)
            node, row = parent, left_row
        self._pending.append((node, row))

    def take(self) -> dict[range, GradientRow]:
        """Return the sums of the pushed leaves, by node, and start again without leaves."""
        sums, self._pending = dict(self._pending), []
        return sums

    def give_back(self, rows: Sequence[GradientRow]) -> None:
        """Return unused rows, for later leaves."""
        self._free += rows


# --- The additions between devices


class TreeReduction:
    """The additions between ranks: each receives its slice of all parts, sums it in the tree, and sends it to all.

    Moves as many bytes as an all-reduce if each rank's leaves make one node.

    Args:
        placement: Of the leaves over the ranks.
        group: The ranks; None: only this process, which has all leaves.
    """

    def __init__(self, placement: LeafPlacement, group: Group | None) -> None:
        self._tree, self._group = placement.tree, group
        self._nodes = [self._tree.roots(leaves) for leaves in placement.ranges]

    def sum(self, parts: Mapping[range, GradientRow]) -> GradientRow:
        """Return the sum of all leaves, in the memory of the first row. Collective: every rank. Blocks until complete.

        Args:
            parts: The sums of the largest nodes within this rank's leaves. The numel of every chunk is a multiple of
                the number of ranks.
        """
        group = self._group
        if group is None:
            return parts[self._tree.root]
        rows = [parts[node] for node in self._nodes[group.rank()]]
        arriving: deque[tuple[Tensor, Tensor, Tensor, Work | None]] = deque()
        gathering: list[tuple[Tensor, Work]] = []  # with the sent tensors, which not every backend keeps alive

        def sum_oldest() -> None:
            total, _, received, work = arriving.popleft()
            if work is not None:
                wait_for(work, _EXCHANGE)
            own_sum = self._sum_slice(received)
            gathering.append((own_sum, all_gather_flat(total, own_sum, group=group)))

        # While one chunk is added, the next are in flight; sums are sent while later chunks still arrive.
        for flats in zip(*(row.flats for row in rows), strict=True):
            if len(arriving) == _MAX_CHUNKS_IN_FLIGHT:
                sum_oldest()
            arriving.append((flats[0], *self._scatter(flats, group)))
        while arriving:
            sum_oldest()
        for _, work in gathering:
            wait_for(work, _EXCHANGE)
        return rows[0]

    def _scatter(self, flats: Sequence[Tensor], group: Group) -> tuple[Tensor, Tensor, Work | None]:
        """Start to send each rank its slice of this rank's parts, and to receive this rank's slice of theirs."""
        num_ranks = group.size()
        numel = flats[0].numel() // num_ranks
        # The data for one rank must be contiguous: its slice of the first node, of the second, and so on.
        sent = torch.stack([flat.view(num_ranks, numel) for flat in flats], dim=1).view(-1) if flats[1:] else flats[0]
        sizes, sent_sizes = [numel * len(nodes) for nodes in self._nodes], [numel * len(flats)] * num_ranks
        received = flats[0].new_empty(sum(sizes))
        work = all_to_all_async(received, sent, output_sizes=sizes, input_sizes=sent_sizes, group=group)
        return sent, received, work

    def _sum_slice(self, received: Tensor) -> Tensor:
        nodes = [node for nodes in self._nodes for node in nodes]
        pieces = dict(zip(nodes, received.chunk(len(nodes)), strict=True))
        return self._tree.combine(pieces, Tensor.add_)
