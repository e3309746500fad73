"""Which rank owns which elements of the parameters, where they lie in flat memory, and the optimizer of one shard."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.collectives import Group, Waitable, all_gather_slices, broadcast_async, has_all_gather, wait_for
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.flat import view_like

# How to make another optimizer like a given one, and whether it may work on flat slices.

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

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of numbers for the whole parameter; of use only where a parameter is one number itself."""

_REFUSED = {
    torch.optim.LBFGS: "works with all parameters together",
    torch.optim.SparseAdam: "is for sparse gradients",
}


@dataclass(frozen=True)
class OptimizerFactory:
    """How to make an optimizer.

    Attributes:
        optimizer_class: Its class.
        defaults: What its constructor gets besides the parameters.
        elementwise: Whether it may work on slices that know no parameters.
    """

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    elementwise: bool

    @classmethod
    def make(
        cls, optimizer_class: type[Optimizer], defaults: Mapping[str, Any], elementwise: bool | None
    ) -> OptimizerFactory:
        """Return the recipe for ``optimizer_class(params, **defaults)``.

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
            declared = getattr(optimizer_class, "elementwise", None)
            elementwise = optimizer_class in ELEMENTWISE if declared is None else bool(declared)
        return cls(optimizer_class, dict(defaults), elementwise)

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerFactory:
        """Return the recipe for an optimizer like this one.

        Raises:
            ConfigurationError: Its constructor wants something else.
        """
        accepted = inspect.signature(type(optimizer)).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        if next(iter(accepted), "") != "params":
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot be made anew on each rank's part: its constructor takes no params "
                "first.\nUse strategy ddp, or the optimizer inside it."
            )
        needed = [
            name
            for name, each in list(accepted.items())[1:]
            if each.default is each.empty
            and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            and name not in optimizer.defaults
        ]
        if needed:
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot be made anew on each rank's part: its constructor wants "
                f"{', '.join(needed)}, which it does not keep in its defaults.\n"
                "Use strategy ddp, or an optimizer that passes its arguments to Optimizer.__init__ as defaults."
            )
        defaults = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
        return cls.make(type(optimizer), defaults, None)

    def build(self, parameters: Sequence[Sequence[nn.Parameter]], options: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Return a new optimizer.

        Args:
            parameters: By param group; groups may be empty.
            options: By param group, what differs from the defaults.
        """
        groups = [{**each, "params": list(group)} for group, each in zip(parameters, options, strict=True)]
        return self.optimizer_class(groups, **self.defaults)


# Where the elements of parameters lie in flat memory: pure functions.


@dataclass(frozen=True)
class ShardRange:
    """Neighbouring elements of one parameter.

    Attributes:
        parameter: Its index.
        group: The index of its param group.
        start, stop: Which elements, counted in the order in which they lie in memory.
    """

    parameter: int
    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


def shard_bounds(numel: int, num_owners: int) -> list[tuple[int, int]]:
    """Return each owner's slice of ``numel`` elements: equal ones, the remainder at the end is the last one's."""
    size = numel // num_owners
    starts = [owner * size for owner in range(num_owners)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def even_end(numel: int, num_owners: int) -> int:
    """Return where the remainder begins: up to there all slices are equal."""
    return numel - numel % num_owners


def cut_ranges(spans: Sequence[ShardRange], start: int, stop: int) -> list[ShardRange]:
    """Return what lies from element ``start`` to ``stop`` of a flat buffer that ``spans`` fill back to back."""
    inside, position = [], 0
    for span in spans:
        first, last = max(start, position), min(stop, position + span.numel)
        if first < last:
            shift = span.start - position
            inside.append(replace(span, start=first + shift, stop=last + shift))
        position += span.numel
    return inside


def with_offsets(spans: Sequence[ShardRange]) -> Iterator[tuple[int, ShardRange]]:
    """Return each span with the place at which it begins."""
    position = 0
    for span in spans:
        yield position, span
        position += span.numel


def lay_flat(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of ``value`` in the order in which those of ``parameter``, of its shape, lie in memory."""
    if parameter.is_contiguous():
        return value.reshape(-1)
    flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    view_like(flat, parameter).copy_(value)
    return flat


# Parameters as views of one flat buffer.


class FlatBuffer:
    """Parameters that lie back to back in ``flat``, and each owner's slice of it.

    Args:
        parameters: By place in the buffer; of one device and dtype. Their ``data`` become views of ``flat``; what
            they held is copied there.
        spans: By place: each whole parameter, as ``ShardRange(parameter, group, 0, numel)``.
        flat: One-dimensional, with as many elements as the parameters have together.
        num_owners: Among how many it is divided.
        bounds: By owner, where its slice begins and ends. Default: equal slices, see `shard_bounds`.

    Attributes:
        is_even: Whether slices are equal, but for the remainder.
        even_end: Where the remainder begins then.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        spans: Sequence[ShardRange],
        flat: Tensor,
        *,
        num_owners: int,
        bounds: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.parameters, self.spans, self.flat = list(parameters), list(spans), flat
        self.is_even, self.even_end = bounds is None, even_end(flat.numel(), num_owners)
        self.bounds = shard_bounds(flat.numel(), num_owners) if bounds is None else list(bounds)
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
        with torch.no_grad():
            views = self.views_of(self.flat)
            torch._foreach_copy_(views, [parameter.detach() for parameter in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._pointers = [parameter.data_ptr() for parameter in self.parameters]

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return views of ``flat``, laid out like this buffer, in the shapes of the parameters."""
        pieces = flat.split([span.numel for span in self.spans])
        return [view_like(piece, parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    @property
    def is_whole(self) -> bool:
        """Whether the parameters still lie in the buffer, and nobody gave them other memory."""
        return [parameter.data_ptr() for parameter in self.parameters] == self._pointers

    def spans_of(self, owner: int) -> list[ShardRange]:
        """Return what lies in the slice of ``owner``."""
        return cut_ranges(self.spans, *self.bounds[owner])

    def slice_of(self, owner: int, flat: Tensor | None = None) -> Tensor:
        """Return the slice of ``owner``, of this buffer or of another ``flat`` one with this layout."""
        start, stop = self.bounds[owner]
        return (self.flat if flat is None else flat)[start:stop]

    def gather_gradients(self, owner: int, out: Tensor) -> None:
        """Copy the gradients of what lies in the slice of ``owner`` to ``out``; those that are None leave it as it is.

        Raises:
            RuntimeError: One is sparse.
        """
        start, stop = self.bounds[owner]
        targets, sources = [], []
        for parameter, (offset, span) in zip(self.parameters, with_offsets(self.spans), strict=True):
            first, last = max(start, offset), min(stop, offset + span.numel)
            gradient = parameter.grad
            if first >= last or gradient is None:
                continue
            if last - first == span.numel:
                targets.append(view_like(out[first - start : last - start], parameter))
                sources.append(gradient)
                continue
            if gradient.stride() == parameter.stride():
                flat = gradient.as_strided((span.numel,), (1,))
            else:
                flat = torch.empty_like(out[:0]).resize_(span.numel)
                view_like(flat, parameter).copy_(gradient)
            targets.append(out[first - start : last - start])
            sources.append(flat[first - offset : last - offset])
        if targets:
            torch._foreach_copy_(targets, sources)


# An optimizer of the parameters that one rank owns, whole, for optimizers that are not element-wise.


def assign_greedily(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Return an owner for each size: the largest first, to who has least so far; a pure function."""
    loads = [0] * num_owners
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class WholeShard:
    """An optimizer of whole parameters; otherwise like `FlatShard`.

    Args:
        recipe: Of any optimizer.
        parameters: Those that this rank owns.
        spans: Which they are.
        options: By param group, its options without "params".
    """

    def __init__(
        self,
        recipe: OptimizerFactory,
        parameters: Sequence[nn.Parameter],
        spans: Sequence[ShardRange],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._parameters, self._spans = list(parameters), list(spans)
        groups: list[list[nn.Parameter]] = [[] for _ in options]
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            groups[span.group].append(parameter)
        self.optimizer = recipe.build(groups, options)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer has now."""
        return [each.grad for each in self._parameters if each.grad is not None]

    def state(self) -> Iterator[tuple[ShardRange, dict[str, Any]]]:
        """Return what the optimizer keeps, by parameter."""
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            if parameter in self.optimizer.state:
                yield span, dict(self.optimizer.state[parameter])

    def load(
        self, read: Callable[[ShardRange], Mapping[str, Any] | None], options: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take over the state that ``read`` returns.

        Args:
            read: What was kept of this parameter; None: nothing.
            options: By param group, its options without "params".
        """
        saved = self.optimizer.state_dict()
        state = {}
        places: dict[int, int] = {}
        for group, option in zip(saved["param_groups"], options, strict=True):
            group.update(option)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                places[id(parameter)] = len(places)
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            place = places[id(parameter)]
            entries = read(span)
            if entries is not None:
                state[place] = dict(entries)
            elif place in saved["state"] and parameter not in self.optimizer.state:
                state[place] = saved["state"][place]
        self.optimizer.load_state_dict({**saved, "state": state})


# Which parameters share a flat buffer, and who owns what of it.

_LARGEST_BYTES = 256 * 2**20
"""So that moving parameters to flat memory does not need twice their memory."""

Places = Sequence[tuple[nn.Parameter, ShardRange]]
"""Parameters, with their index and param group."""


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Returns a flat tensor of so many elements."""


def slices_of(places: Places, num_owners: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters into flat buffers, of which each owner has an equal slice. As collective as ``allocate``."""
    return [_make_buffer(part, num_owners, allocate) for alike in _alike(places) for part in _of_size(alike)]


def buckets_of(places: Places, buckets: Sequence[Bucket], num_owners: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters as their gradients lie in ``buckets``. As collective as ``allocate``.

    Args:
        places: Those of all parameters in ``buckets``, and maybe others, which are left out.
        buckets: Of the `DistributedDataParallel`, the same on every rank.
        num_owners: Among how many each buffer is divided.
        allocate: Makes a buffer's memory.
    """
    place_of = {id(parameter): (parameter, span) for parameter, span in places}
    return [
        _make_buffer([place_of[id(parameter)] for parameter in bucket.parameters], num_owners, allocate)
        for bucket in buckets
    ]


def regions_of(places: Places, num_owners: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters into flat buffers in which each owner's lie together, whole. As collective as ``allocate``.

    They own nearly as many elements as each other, as far as the sizes of the parameters allow.
    """
    buffers = []
    for alike in _alike(places):
        owners = assign_greedily([span.numel for _, span in alike], num_owners)
        of_owner = [
            [place for place, owner in zip(alike, owners, strict=True) if owner == number]
            for number in range(num_owners)
        ]
        ends = list(accumulate(sum(span.numel for _, span in own) for own in of_owner))
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        buffers.append(_make_buffer([place for own in of_owner for place in own], num_owners, allocate, bounds))
    return buffers


def _alike(places: Places) -> list[list[tuple[nn.Parameter, ShardRange]]]:
    """Return the parameters by device, dtype and whether they are trained: frozen ones would take no part in steps."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[tuple[nn.Parameter, ShardRange]]] = {}
    for parameter, span in places:
        alike.setdefault((parameter.device, parameter.dtype, parameter.requires_grad), []).append((parameter, span))
    return list(alike.values())


def _of_size(places: list[tuple[nn.Parameter, ShardRange]]) -> list[list[tuple[nn.Parameter, ShardRange]]]:
    parts: list[list[tuple[nn.Parameter, ShardRange]]] = [[]]
    size_bytes = 0
    for parameter, span in places:
        if parts[-1] and size_bytes + parameter.nbytes > _LARGEST_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append((parameter, span))
        size_bytes += parameter.nbytes
    return parts


def _make_buffer(
    places: Places, num_owners: int, allocate: Allocate, bounds: Sequence[tuple[int, int]] | None = None
) -> FlatBuffer:
    parameters, spans = [parameter for parameter, _ in places], [span for _, span in places]
    flat = allocate(sum(span.numel for span in spans), parameters[0].dtype, parameters[0].device)
    return FlatBuffer(parameters, spans, flat, num_owners=num_owners, bounds=bounds)


# Each rank's part of the parameters on its way to the other ranks.


class ParameterGather:
    """Sends what each rank owns of flat buffers to all ranks.

    Args:
        group: The ranks that take part, each the owner of its number.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[Waitable] = []
        self._remainders: list[tuple[Tensor, list[Tensor]]] = []

    def start(self, buffers: Sequence[FlatBuffer], *, alone: bool) -> None:
        """Start to send this rank's part of ``buffers``, and to receive the others'.

        Collective: every rank, in the same order. Does not block; `wait` makes the parameters valid.

        All ranks then have the same bits, since each element comes from one rank.

        Args:
            buffers: The same on every rank.
            alone: Whether `wait` comes next.
        """
        if self._group.size() == 1:
            return
        last = self._group.size() - 1
        remainders: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in buffers:
            flat = buffer.flat
            if not (buffer.is_even and has_all_gather(self._group, flat.device)):
                for owner in range(self._group.size()):
                    part = buffer.slice_of(owner)
                    if part.numel():
                        self._works.append(broadcast_async(part, group=self._group, src=owner, alone=alone))
                continue
            if buffer.even_end:
                self._works.append(all_gather_slices(flat[: buffer.even_end], group=self._group, alone=alone))
            if buffer.even_end < flat.numel():
                remainders.setdefault((flat.device, flat.dtype), []).append(flat[buffer.even_end :])
        for parts in remainders.values():  # fewer elements than ranks in each
            packed = torch.cat(parts)
            self._works.append(broadcast_async(packed, group=self._group, src=last, alone=alone))
            self._remainders.append((packed, parts))

    def wait(self) -> None:
        """Block until all parameters are valid (on CUDA: let the current stream wait)."""
        if not self._works:
            return
        works, self._works = self._works, []
        remainders, self._remainders = self._remainders, []
        for work in works:
            wait_for(work)
        for packed, parts in remainders:
            torch._foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))


# An optimizer of one owner's slices of flat parameters.
#
# [Note: segments]
# What the optimizer inside sees as a parameter is a *segment*: neighbouring elements of a slice, of one param group,
# and of parameters that have received the same updates so far. There are as many segments as param groups take turns
# in a slice, so a step is a few kernels, however many parameters there are.
#
# A parameter without a gradient must not be touched, not by weight decay or momentum either, and its number of steps
# (Adam's bias correction) must stand still. So the first time that only some parameters of a segment have a gradient,
# the segment is cut there, and its state with it: from then on both parts have numbers of their own. Nothing is saved
# and put back, and the result is exact.
#
# [Note: cache]
# torch's optimizers on the CPU pass over a parameter once for each operation, a dozen times in Adam. For a segment of
# millions of elements all of that comes from memory. So segments are cut there to a size of which value, gradient and
# state fit in a core's cache together, and the passes but the first find them there. Fused and foreach kernels pass
# once, or over all parameters in turn; for them, and on other devices, segments stay long.

Entries = Mapping[str, Any]
"""What an optimizer keeps of a parameter, by name: per element in tensors, for all of it in numbers."""


_CHUNK_BYTES = 2**18
"""Four times that, for Adam's value, gradient and two averages, fit in the second-level cache of most cores."""


class _CacheChunk(NamedTuple):
    """What may become one segment: where it begins in which slice, and what it is made of."""

    piece: int
    offset: int
    spans: tuple[ShardRange, ...]


@dataclass(frozen=True, eq=False)
class Segment:
    """See [Note: segments].

    Attributes:
        piece: The index of the slice that it is a part of.
        offset: Where it begins there.
        spans: What it is made of.
        parameter: Its elements, for the optimizer.
    """

    piece: int
    offset: int
    spans: tuple[ShardRange, ...]
    parameter: nn.Parameter

    @property
    def group(self) -> int:
        """The index of its param group."""
        return self.spans[0].group

    def is_per_element(self, value: object) -> bool:
        """Whether ``value`` of the optimizer's state has a number for each element."""
        return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.parameter.numel()


class FlatShard:
    """An optimizer of one owner's slices.

    Args:
        recipe: Of an element-wise optimizer.
        pieces: The slices: one-dimensional tensors, updated in place.
        spans: What lies in each slice.
        options: By param group, its options without "params".

    Attributes:
        optimizer: The one that does the work.
    """

    def __init__(
        self,
        recipe: OptimizerFactory,
        pieces: Sequence[Tensor],
        spans: Sequence[Sequence[ShardRange]],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._recipe, self._pieces = recipe, list(pieces)
        self._chunks = [
            _CacheChunk(index, start, tuple(cut_ranges(spans[index], start, start + size)))
            for index, piece in enumerate(self._pieces)
            for size in [_chunk_numel(piece, [recipe.defaults, *options])]
            for start in range(0, piece.numel(), size)
        ]
        self._install([dict(each) for each in options], lambda span: span.group)

    def set_gradients(self, gradients: Sequence[Tensor], present: Sequence[int]) -> None:
        """Give the optimizer its gradients, until `drop_gradients`.

        Args:
            gradients: Like the slices.
            present: By parameter, whether it has a gradient; what ``gradients`` holds for others does not matter.
        """
        if not all(present):
            self._cut_by(present)
        for segment in self._segments:
            grad = None
            if present[segment.spans[0].parameter]:
                end = segment.offset + segment.parameter.numel()
                grad = gradients[segment.piece][segment.offset : end]
            segment.parameter.grad = grad

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer has now."""
        return [each.parameter.grad for each in self._segments if each.parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Let go of the gradients."""
        for segment in self._segments:
            segment.parameter.grad = None

    def state(self) -> Iterator[tuple[ShardRange, dict[str, Any]]]:
        """Return what the optimizer keeps, by pieces of parameters: flat views, and numbers for the whole of it."""
        for segment in self._segments:
            if segment.parameter not in self.optimizer.state:
                continue
            entries = self.optimizer.state[segment.parameter]
            for offset, span in with_offsets(segment.spans):
                yield (
                    span,
                    {
                        name: value[offset : offset + span.numel] if segment.is_per_element(value) else value
                        for name, value in entries.items()
                    },
                )

    def load(self, read: Callable[[ShardRange], Entries | None], options: Sequence[Mapping[str, Any]]) -> None:
        """Make the optimizer anew, with the state that ``read`` returns.

        Args:
            read: What was kept of these elements, as `state` returns it; None: nothing.
            options: By param group, its options without "params".
        """
        found = {span: read(span) for chunk in self._chunks for span in chunk.spans}
        self._install([dict(each) for each in options], lambda span: (span.group, _numbers_of(found[span])))
        state: dict[int, Any] = {}
        saved = self.optimizer.state_dict()
        places = {id(each): place for place, each in enumerate(self._in_order())}
        for segment in self._segments:
            entries = [found[span] for span in segment.spans]
            first = entries[0]
            place = places[id(segment.parameter)]
            if first is None:
                if place in saved["state"]:  # what the constructor made
                    state[place] = saved["state"][place]
                continue
            state[place] = {
                name: torch.cat([each[name] for each in entries if each is not None])
                if _is_flat(value)
                else _copy(value)  # `load_state_dict` keeps what it is given
                for name, value in first.items()
            }
        saved["state"] = state
        self.optimizer.load_state_dict(saved)

    def _install(self, options: list[dict[str, Any]], alike: Callable[[ShardRange], object]) -> None:
        """Make segments of neighbours that are ``alike``, and an optimizer for them."""
        self._segments = [
            segment
            for chunk in self._chunks
            for segment in self._segments_of(
                chunk.piece, chunk.offset, [list(run) for _, run in groupby(chunk.spans, key=alike)]
            )
        ]
        parameters: list[list[nn.Parameter]] = [[] for _ in options]
        for segment in self._segments:
            parameters[segment.group].append(segment.parameter)
        self.optimizer = self._recipe.build(parameters, options)

    def _segments_of(self, piece: int, offset: int, runs: Sequence[Sequence[ShardRange]]) -> list[Segment]:
        """Return a segment for each run of spans, back to back from ``offset`` in a piece."""
        segments = []
        for run in runs:
            end = offset + sum(span.numel for span in run)
            segments.append(Segment(piece, offset, tuple(run), nn.Parameter(self._pieces[piece][offset:end].detach())))
            offset = end
        return segments

    def _in_order(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _cut_by(self, present: Sequence[int]) -> None:
        """Cut segments in which some parameters are ``present`` and some are not."""
        segments = []
        for segment in self._segments:
            runs = [list(run) for _, run in groupby(segment.spans, key=lambda span: bool(present[span.parameter]))]
            segments += [segment] if len(runs) == 1 else self._cut(segment, runs)
        self._segments = segments

    def _cut(self, segment: Segment, runs: list[list[ShardRange]]) -> list[Segment]:
        parts = self._segments_of(segment.piece, segment.offset, runs)
        group = self.optimizer.param_groups[segment.group]["params"]
        place = next(index for index, each in enumerate(group) if each is segment.parameter)
        group[place : place + 1] = [part.parameter for part in parts]
        if segment.parameter not in self.optimizer.state:
            return parts
        entries = self.optimizer.state.pop(segment.parameter)
        for part in parts:
            start = part.offset - segment.offset
            end = start + part.parameter.numel()
            self.optimizer.state[part.parameter] = {
                # copies, so that parts do not keep the memory of the whole
                name: value[start:end].clone() if segment.is_per_element(value) else _copy(value)
                for name, value in entries.items()
            }
        return parts


def _chunk_numel(piece: Tensor, options: Sequence[Mapping[str, Any]]) -> int:
    """Return how many elements of a slice may be one segment, see [Note: cache]."""
    passes_once = any(each.get("fused") or each.get("foreach") for each in options)
    if piece.device.type != "cpu" or passes_once:
        return max(piece.numel(), 1)
    return max(_CHUNK_BYTES // piece.itemsize, 1)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _numbers_of(entries: Entries | None) -> object:
    """Return what segments that are to be one must have in common."""
    if entries is None:
        return None
    return tuple(
        (name, "elements" if _is_flat(value) else float(value) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(entries.items())
    )
