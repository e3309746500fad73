"""Which rank owns which elements of the parameters: flat buffers, the shard of each rank, and its way to the others.

[Note: flat buffers]
Parameters of one device and dtype lie back to back in a *flat buffer*, as views of it. Each rank owns a *shard* of the
buffer: a slice of equal size, the remainder at the end belongs to the last rank; or, for optimizers that need whole
parameters, a region that holds whole ones. A `ShardRange` says which elements of which parameter lie where in it. With
``shard_gradients`` a buffer has the layout of a bucket of the `DistributedDataParallel`, so that a rank's shard of the
parameters and its slice of the reduced gradients are the same elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.collectives import Group, Waitable, all_gather_slices, broadcast_async, has_all_gather, wait_for
from lockstep.errors import ConfigurationError
from lockstep.parallel.flat import flatten_like, view_like

# Which rank owns which elements of the parameters: flat buffers, the shard of each rank, and its way to the others.
#
# [Note: flat buffers]
# Parameters of one device and dtype lie back to back in a *flat buffer*, as views of it. Each rank owns a *shard* of
# the buffer: a slice of equal size, the remainder at the end belongs to the last rank; or, for optimizers that need
# whole parameters, a region that holds whole ones. A `ShardRange` says which elements of which parameter lie where in
# it. With ``shard_gradients`` a buffer has the layout of a bucket of the `DistributedDataParallel`, so that a rank's
# shard of the parameters and its slice of the reduced gradients are the same elements.

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


# The optimizer of one rank's shard.
#
# [Note: segments]
# What the optimizer inside sees as a parameter is a *segment*: neighbouring elements of a shard, of one param group,
# and of parameters that have received the same updates so far. There are as many segments as param groups take turns
# in a shard, so a step is a few kernels, however many parameters there are.
#
# A parameter without a gradient must not be touched, not by weight decay or momentum either, and its number of steps
# (Adam's bias correction) must stand still. So the first time that only some parameters of a segment have a gradient,
# the segment is split there, and its state with it: from then on both parts have numbers of their own. Nothing is saved
# and put back, and the result is exact.
#
# An optimizer that is not element-wise gets the parameters that this rank owns, whole: each is a segment.
#
# [Note: cache]
# torch's optimizers on the CPU pass over a parameter once for each operation, a dozen times in Adam. For a segment of
# millions of elements all of that comes from memory. So segments are cut there to a size of which value, gradient and
# state fit in a core's cache together, and the passes but the first find them there. Fused and foreach kernels pass
# once, or over all parameters in turn; for them, and on other devices, segments stay long.

Entries = Mapping[str, Any]
"""What an optimizer keeps of a parameter, by name: per element in tensors, for all of it in numbers."""

Read = Callable[[ShardRange], Entries | None]
"""Returns what was kept of these elements, those that are per element flat; None: nothing."""

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)
"""Those whose new value of an element depends on that element alone, its gradient, its state, and numbers that are
the same for the whole parameter. Subclasses may do more, so they are not meant."""

_REFUSED = {
    torch.optim.LBFGS: "works with all parameters together",
    torch.optim.SparseAdam: "is for sparse gradients",
}

_CHUNK_BYTES = 2**18
"""Four times that, for Adam's value, gradient and two averages, fit in the second-level cache of most cores."""


@dataclass(frozen=True)
class OptimizerFactory:
    """How to make an optimizer.

    Attributes:
        optimizer_class: Its class.
        defaults: What its constructor gets besides the parameters.
        elementwise: Whether it may work on flat slices that know no parameters.
    """

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    elementwise: bool

    @classmethod
    def make(
        cls, optimizer_class: type[Optimizer], defaults: Mapping[str, Any], elementwise: bool | None = None
    ) -> OptimizerFactory:
        """Return the factory for ``optimizer_class(params, **defaults)``.

        Args:
            optimizer_class: Any optimizer that does not look at all parameters together.
            defaults: See above.
            elementwise: None: what is known of the class, or what its attribute ``elementwise`` says.

        Raises:
            ConfigurationError: It is no class of optimizers, or one that cannot be divided.
        """
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise ConfigurationError(
                f"optimizer_class is {optimizer_class!r}, no class of optimizers.\n"
                "Give the class and its arguments: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)."
            )
        for refused, why in _REFUSED.items():
            if issubclass(optimizer_class, refused):
                raise ConfigurationError(
                    f"{optimizer_class.__name__} {why}, so it cannot be divided among ranks.\n"
                    "Use it as it is, without ZeroRedundancyOptimizer."
                )
        if elementwise is None:
            elementwise = bool(getattr(optimizer_class, "elementwise", optimizer_class in ELEMENTWISE))
        return cls(optimizer_class, dict(defaults), elementwise)

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerFactory:
        """Return the factory for optimizers like this one.

        Raises:
            ConfigurationError: Its constructor wants something else.
        """
        name = type(optimizer).__name__
        first, *others = inspect.signature(type(optimizer)).parameters.values()
        if first.name != "params":
            raise ConfigurationError(
                f"{name} cannot be made anew on each rank's part: its constructor takes no params first.\n"
                "Use strategy ddp, or the optimizer inside it."
            )
        named = [each for each in others if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        needed = [each.name for each in named if each.default is each.empty and each.name not in optimizer.defaults]
        if needed:
            raise ConfigurationError(
                f"{name} cannot be made anew on each rank's part: its constructor wants {', '.join(needed)}, which it "
                "does not keep in its defaults.\n"
                "Use strategy ddp, or an optimizer that passes its arguments to Optimizer.__init__ as defaults."
            )
        takes_any = any(each.kind is each.VAR_KEYWORD for each in others)
        accepted = optimizer.defaults if takes_any else {each.name for each in named}
        return cls.make(type(optimizer), {key: value for key, value in optimizer.defaults.items() if key in accepted})

    def build(self, parameters: Sequence[Sequence[nn.Parameter]], options: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Return a new optimizer.

        Args:
            parameters: By param group; groups may be empty.
            options: By param group, what differs from the defaults.
        """
        groups = [{**each, "params": list(group)} for group, each in zip(parameters, options, strict=True)]
        return self.optimizer_class(groups, **self.defaults)


def options_of(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what param groups say besides their parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in param_groups]


@dataclass(frozen=True, eq=False)
class Segment:
    """See [Note: segments].

    Attributes:
        buffer: The index of the flat buffer that it lies in.
        offset: Where it begins in this rank's shard of it.
        ranges: What it is made of.
        parameter: Its elements, for the optimizer.
    """

    buffer: int
    offset: int
    ranges: tuple[ShardRange, ...]
    parameter: nn.Parameter

    def is_per_element(self, value: object) -> bool:
        """Return whether ``value`` of the optimizer's state has a number for each element."""
        return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.parameter.numel()


class ShardOptimizer:
    """The optimizer of what one rank owns of flat buffers.

    Args:
        factory: Of the optimizer.
        buffers: Partitioned among the ranks, so that shards hold whole parameters unless it is element-wise.
        rank: Whose shards they are.
        options: By param group, its options without "params".

    Attributes:
        optimizer: The one that does the work.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        buffers: Sequence[FlatBuffer],
        rank: int,
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._factory = factory
        self._shards = [buffer.shard_of(rank) for buffer in buffers]
        self._parameters = {
            whole.parameter: parameter
            for buffer in buffers
            for parameter, whole in zip(buffer.parameters, buffer.ranges, strict=True)
        }
        passes_once = any(each.get("fused") or each.get("foreach") for each in (factory.defaults, *options))
        self._chunks: list[tuple[int, int, list[ShardRange]]] = []
        for index, buffer in enumerate(buffers):
            ranges, shard = buffer.ranges_of(rank), self._shards[index]
            is_cut = factory.elementwise and shard.is_cpu and not passes_once  # see [Note: cache]
            size = max(_CHUNK_BYTES // shard.itemsize if is_cut else shard.numel(), 1)
            for start in range(0, shard.numel(), size):
                self._chunks.append((index, start, cut_ranges(ranges, start, start + size)))
        self._install(options, lambda each: each.group)

    def set_gradients(self, gradients: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Give an element-wise optimizer its gradients, until `drop_gradients`; others take ``param.grad``.

        Args:
            gradients: By buffer, like this rank's shard.
            present: By parameter, whether it has a gradient; what ``gradients`` holds for others does not matter.
        """
        if not all(present):
            self._split_by(present)
        for segment in self._segments:
            if present[segment.ranges[0].parameter]:
                end = segment.offset + segment.parameter.numel()
                segment.parameter.grad = gradients[segment.buffer][segment.offset : end]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer has now."""
        return [each.parameter.grad for each in self._segments if each.parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Let go of the gradients of an element-wise optimizer."""
        if self._factory.elementwise:
            for segment in self._segments:
                segment.parameter.grad = None

    def state(self) -> Iterator[tuple[ShardRange, dict[str, Any]]]:
        """Yield what the optimizer keeps, by range: views of what is per element, and numbers for all of it."""
        for segment in self._segments:
            if segment.parameter not in self.optimizer.state:
                continue
            entries = self.optimizer.state[segment.parameter]
            for offset, each in with_offsets(segment.ranges):
                cut = slice(offset, offset + each.numel)
                yield (
                    each,
                    {name: value[cut] if segment.is_per_element(value) else value for name, value in entries.items()},
                )

    def load(self, read: Read, options: Sequence[Mapping[str, Any]]) -> None:
        """Make the optimizer anew, with the state that ``read`` returns and these options, by param group."""
        found = {each: read(each) for _, _, ranges in self._chunks for each in ranges}
        # Only what has made the same number of steps may be one segment.
        self._install(options, lambda each: (each.group, _numbers_of(found[each])))
        # load_state_dict() brings entries to the device and dtype that the optimizer wants; it knows parameters by
        # their number over all groups.
        saved = self.optimizer.state_dict()
        in_order = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        place_of = {id(parameter): place for place, parameter in enumerate(in_order)}
        for segment in self._segments:
            parts = [entries for each in segment.ranges if (entries := found[each]) is not None]
            if parts:  # else what the constructor may have made
                saved["state"][place_of[id(segment.parameter)]] = {
                    name: torch.cat([part[name] for part in parts]) if _is_flat(value) else _copy(value)
                    for name, value in parts[0].items()
                }
        self.optimizer.load_state_dict(saved)

    def _install(self, options: Sequence[Mapping[str, Any]], key: Callable[[ShardRange], object]) -> None:
        """Make segments of neighbours with the same ``key``, and an optimizer for them."""
        self._segments: list[Segment] = []
        for buffer, offset, ranges in self._chunks:
            if self._factory.elementwise:
                runs = [list(run) for _, run in groupby(ranges, key=key)]
            else:
                runs = [[each] for each in ranges]
            self._segments += self._make_segments(buffer, offset, runs)
        parameters: list[list[nn.Parameter]] = [[] for _ in options]
        for segment in self._segments:
            parameters[segment.ranges[0].group].append(segment.parameter)
        self.optimizer = self._factory.build(parameters, options)

    def _make_segments(self, buffer: int, offset: int, runs: Sequence[Sequence[ShardRange]]) -> list[Segment]:
        """Return a segment for each run of ranges, back to back from ``offset`` in this rank's shard of a buffer."""
        segments = []
        for run in runs:
            end = offset + sum(each.numel for each in run)
            if self._factory.elementwise:
                parameter = nn.Parameter(self._shards[buffer][offset:end].detach())
            else:
                parameter = self._parameters[run[0].parameter]
            segments.append(Segment(buffer, offset, tuple(run), parameter))
            offset = end
        return segments

    def _split_by(self, present: Sequence[bool]) -> None:
        """Split the segments in which some parameters are ``present`` and some are not."""
        segments = []
        for segment in self._segments:
            runs = [list(run) for _, run in groupby(segment.ranges, key=lambda each: present[each.parameter])]
            segments += [segment] if len(runs) == 1 else self._split(segment, runs)
        self._segments = segments

    def _split(self, segment: Segment, runs: list[list[ShardRange]]) -> list[Segment]:
        parts = self._make_segments(segment.buffer, segment.offset, runs)
        group = self.optimizer.param_groups[segment.ranges[0].group]["params"]
        place = next(index for index, each in enumerate(group) if each is segment.parameter)
        group[place : place + 1] = [part.parameter for part in parts]
        if segment.parameter not in self.optimizer.state:
            return parts
        entries = self.optimizer.state.pop(segment.parameter)
        for part in parts:
            start = part.offset - segment.offset
            cut = slice(start, start + part.parameter.numel())
            self.optimizer.state[part.parameter] = {
                # copies, so that parts do not keep the memory of the whole
                name: _copy(value[cut] if segment.is_per_element(value) else value)
                for name, value in entries.items()
            }
        return parts


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _numbers_of(entries: Entries | None) -> object:
    """Return what ranges that are to be one segment must have in common."""
    if entries is None:
        return None
    return tuple(
        (name, "elements" if _is_flat(value) else float(value) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(entries.items())
    )
