"""Which rank owns which elements of the parameters: flat buffers, the shard of each rank, and its way to the others.

[Note: flat buffers]
Parameters of one device and dtype lie back to back in a *flat buffer*, as views of it. Each rank owns a *shard* of the
buffer: a slice of equal size, the remainder at the end belongs to the last rank; or, for optimizers that need whole
parameters, a region that holds whole ones. A `ShardRange` says which elements of which parameter lie where in it. With
``shard_gradients`` a buffer has the layout of a bucket of the `DistributedDataParallel`, so that a rank's shard of the
parameters and its slice of the reduced gradients are the same elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import (
    Group,
    Waitable,
    all_gather_slices,
    broadcast_async,
    has_all_gather,
    wait_for,
)
from lockstep.errors import ConfigurationError
from lockstep.parallel.flat import flatten_like, view_like

_MAX_BUFFER_BYTES = 256 * 2**20
"""So that moving parameters to flat memory does not need twice their memory."""


@dataclass(frozen=True)
class ShardRange:
    """Neighbouring elements of one parameter.

    Attributes:
        parameter: Its index.
        start, stop: Which elements, counted in the order in which they lie in memory.
        group: The index of its param group.
    """

    parameter: int
    start: int
    stop: int
    group: int = 0

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


Members = Sequence[tuple[nn.Parameter, ShardRange]]
"""Parameters, each with the range of all of its elements."""

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Returns a flat tensor of so many elements."""


def shard_bounds(numel: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return each rank's slice of ``numel`` elements: equal ones, the remainder at the end is the last one's."""
    size = numel // num_ranks
    starts = [rank * size for rank in range(num_ranks)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def even_end(numel: int, num_ranks: int) -> int:
    """Return where the remainder begins: up to there all slices are equal."""
    return numel - numel % num_ranks


def cut_ranges(ranges: Iterable[ShardRange], start: int, stop: int) -> list[ShardRange]:
    """Return what lies from element ``start`` to ``stop`` of flat memory that ``ranges`` fill back to back."""
    inside = []
    for position, each in with_offsets(ranges):
        first, last = max(start, position), min(stop, position + each.numel)
        if first < last:
            shift = each.start - position
            inside.append(replace(each, start=first + shift, stop=last + shift))
    return inside


def with_offsets(ranges: Iterable[ShardRange]) -> Iterator[tuple[int, ShardRange]]:
    """Yield each range with the offset at which it begins, if they lie back to back."""
    offset = 0
    for each in ranges:
        yield offset, each
        offset += each.numel


class FlatBuffer:
    """Parameters that lie back to back in ``flat``, and each rank's shard of it; see [Note: flat buffers].

    Args:
        members: The parameters in their order, of one device and dtype. Their ``data`` become views of ``flat``; what
            they held is copied there.
        flat: One-dimensional, with as many elements as the parameters have together.
        num_ranks: Among how many it is partitioned.
        bounds: By rank, where its shard begins and ends. Default: see `shard_bounds`.
    """

    def __init__(
        self, members: Members, flat: Tensor, *, num_ranks: int, bounds: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self.parameters, self.ranges = [each for each, _ in members], [each for _, each in members]
        self.flat = flat
        self.has_equal_slices = bounds is None
        self.bounds = shard_bounds(flat.numel(), num_ranks) if bounds is None else list(bounds)
        self.take_back()

    def take_back(self) -> None:
        """Copy what the parameters hold to the buffer, and make them views of it.

        Raises:
            ConfigurationError: They are of another device or dtype by now.
        """
        first = self.parameters[0]
        if first.device != self.flat.device or first.dtype != self.flat.dtype:
            raise ConfigurationError(
                f"Parameters were {self.flat.dtype} on {self.flat.device} when the optimizer was made, and are now "
                f"{first.dtype} on {first.device}.\nMove or convert the model before the optimizer is made."
            )
        pieces = self.flat.split([each.numel for each in self.ranges])
        # Strides such as channels_last are kept: kernels and gradients rely on them.
        views = [view_like(piece, parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(views, [parameter.detach() for parameter in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._pointers = [parameter.data_ptr() for parameter in self.parameters]

    @property
    def is_intact(self) -> bool:
        """Whether the parameters still lie in the buffer, and nobody gave them other memory."""
        return [parameter.data_ptr() for parameter in self.parameters] == self._pointers

    def shard_of(self, rank: int, flat: Tensor | None = None) -> Tensor:
        """Return the shard of ``rank``, of this buffer or of another ``flat`` tensor with its layout."""
        start, stop = self.bounds[rank]
        return (self.flat if flat is None else flat)[start:stop]

    def ranges_of(self, rank: int) -> list[ShardRange]:
        """Return what lies in the shard of ``rank``."""
        return cut_ranges(self.ranges, *self.bounds[rank])

    def gradients_of(self, rank: int) -> Tensor:
        """Return a copy of the gradients of what lies in the shard of ``rank``; arbitrary numbers where there is none.

        Raises:
            RuntimeError: One is sparse.
        """
        start, stop = self.bounds[rank]
        shard = torch.empty_like(self.shard_of(rank))
        targets, sources = [], []
        for parameter, (offset, each) in zip(self.parameters, with_offsets(self.ranges), strict=True):
            first, last = max(start, offset), min(stop, offset + each.numel)
            if first < last and parameter.grad is not None:
                targets.append(shard[first - start : last - start])
                sources.append(flatten_like(parameter.grad, parameter)[first - offset : last - offset])
        if targets:
            torch._foreach_copy_(targets, sources)
        return shard


def partition_evenly(members: Members, num_ranks: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters into flat buffers, of which each rank has an equal slice. As collective as ``allocate``."""
    buffers = []
    for alike in _by_kind(members):
        parts: list[list[tuple[nn.Parameter, ShardRange]]] = [[]]
        size_bytes = 0
        for parameter, whole in alike:
            if parts[-1] and size_bytes + parameter.nbytes > _MAX_BUFFER_BYTES:
                parts.append([])
                size_bytes = 0
            parts[-1].append((parameter, whole))
            size_bytes += parameter.nbytes
        buffers += [FlatBuffer(part, _allocate_for(part, allocate), num_ranks=num_ranks) for part in parts]
    return buffers


def partition_like_buckets(
    members: Members, buckets: Sequence[Sequence[nn.Parameter]], num_ranks: int, allocate: Allocate
) -> list[FlatBuffer]:
    """Lay parameters as their gradients lie in ``buckets``. As collective as ``allocate``.

    Args:
        members: Those of all parameters in the buckets, and maybe others, which are left out.
        buckets: The parameters of each bucket, the same on every rank.
        num_ranks: Among how many each buffer is partitioned.
        allocate: Makes a buffer's memory.
    """
    member_of = {id(parameter): (parameter, whole) for parameter, whole in members}
    found = [[member_of[id(parameter)] for parameter in bucket] for bucket in buckets]
    return [FlatBuffer(each, _allocate_for(each, allocate), num_ranks=num_ranks) for each in found]


def partition_by_parameter(members: Members, num_ranks: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters into flat buffers in which each rank's lie together, whole. As collective as ``allocate``.

    Ranks own nearly as many elements as each other, as far as the sizes of the parameters allow.
    """
    buffers = []
    for alike in _by_kind(members):
        owners = assign_greedily([whole.numel for _, whole in alike], num_ranks)
        owned = [
            [each for each, owner in zip(alike, owners, strict=True) if owner == rank] for rank in range(num_ranks)
        ]
        ends = list(accumulate(sum(whole.numel for _, whole in mine) for mine in owned))
        ordered = [each for mine in owned for each in mine]
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        buffers.append(FlatBuffer(ordered, _allocate_for(ordered, allocate), num_ranks=num_ranks, bounds=bounds))
    return buffers


def assign_greedily(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each size: the largest first, to the one with least so far; a pure function."""
    # All ranks compute this, so ties must fall alike: by index, never by address.
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def start_parameter_gather(buffers: Sequence[FlatBuffer], group: Group, *, alone: bool) -> list[Waitable]:
    """Start to send this rank's shards of ``buffers``, and to receive the others'; return what to wait for.

    Collective: every rank, in the same order. Does not block.

    All ranks then have the same bits, since each element comes from one rank.

    Args:
        buffers: The same on every rank.
        group: The ranks that take part.
        alone: Whether the caller waits next, and has nothing else to do meanwhile.
    """
    works: list[Waitable] = []
    last = group.size() - 1
    for buffer in buffers if last else ():
        if buffer.has_equal_slices and has_all_gather(group, buffer.flat.device):
            end = even_end(buffer.flat.numel(), group.size())
            sources = [(last, buffer.flat[end:])]  # the remainder: fewer elements than ranks
            if end:
                works.append(all_gather_slices(buffer.flat[:end], group=group, alone=alone))
        else:
            sources = [(rank, buffer.shard_of(rank)) for rank in range(group.size())]
        works += [broadcast_async(part, group=group, src=rank, alone=alone) for rank, part in sources if part.numel()]
    return works


def wait_for_all(works: Iterable[Waitable]) -> None:
    """Block until all are complete (on CUDA: let the current stream wait)."""
    for work in works:
        wait_for(work, "gathering of the updated parameters")


def _by_kind(members: Members) -> list[list[tuple[nn.Parameter, ShardRange]]]:
    """Return the parameters by device, dtype and whether they are trained: frozen ones would take no part in steps."""
    kinds: dict[tuple[torch.device, torch.dtype, bool], list[tuple[nn.Parameter, ShardRange]]] = {}
    for parameter, whole in members:
        kinds.setdefault((parameter.device, parameter.dtype, parameter.requires_grad), []).append((parameter, whole))
    return list(kinds.values())


def _allocate_for(members: Members, allocate: Allocate) -> Tensor:
    first = members[0][0]
    return allocate(sum(whole.numel for _, whole in members), first.dtype, first.device)
