"""Which rank owns which elements of the parameters: flat buffers, each rank's shard of them, and its optimizer."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, jit, nn
from torch.optim import Optimizer

from lockstep.base.containers import grouped, in_chunks
from lockstep.base.torch_internals import foreach_copy_, own_parameters, tree_leaves
from lockstep.comm import collectives
from lockstep.comm.collectives import CommonMemory, Group, Work, wait_for
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.flat import ALIGNMENT_BYTES, cut_views, flatten_like, padded_numel, view_like

# A limit, so that moving parameters to flat memory does not need twice their memory.
_MAX_BUFFER_BYTES = 256 * 2**20


class ShardRange(NamedTuple):
    """Neighbouring elements of one parameter.

    Attributes:
        parameter: Its index.
        start, stop: The range of elements, counted in memory order.
        group: The index of its param group.
    """

    parameter: int
    start: int
    stop: int
    group: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


# A parameter, and the range of all of its elements.
Member = tuple[nn.Parameter, ShardRange]

# Returns flat memory for a number of elements, with the device and dtype of a parameter.
Allocate = Callable[[int, nn.Parameter], Tensor | CommonMemory]


def shard_bounds(numel: int, num_ranks: int, itemsize: int) -> list[tuple[int, int]]:
    """Return each rank's slice of ``numel`` elements: equal and aligned ones, as far as there are elements."""
    size = padded_numel(numel, itemsize, num_ranks) // num_ranks
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(num_ranks)]


def cut_ranges(ranges: Sequence[ShardRange], start: int, stop: int) -> list[ShardRange]:
    """Return the parts from element ``start`` to ``stop`` of flat memory that ``ranges`` fill back to back."""
    inside = []
    for offset, part in with_offsets(ranges):
        first, last = max(start, offset), min(stop, offset + part.numel)
        if first < last:
            shift = part.start - offset
            inside.append(part._replace(start=first + shift, stop=last + shift))
    return inside


def with_offsets(ranges: Sequence[ShardRange]) -> Iterator[tuple[int, ShardRange]]:
    """Return each range with the offset at which it begins, if they lie back to back."""
    return zip(accumulate((part.numel for part in ranges), initial=0), ranges, strict=False)


class FlatBuffer:
    """Parameters that lie back to back in ``flat``, and each rank's shard of it; see [Note: flat buffers].

    [Note: flat buffers]
    Parameters of one device and dtype lie back to back in a *flat buffer*, as views of it. Parameters whose size is not
    a multiple of 16 bytes come last, so that the others are aligned. Each rank owns a *shard* of the buffer: a slice of
    equal size, which begins at a multiple of 16 bytes; or, for optimizers that need whole parameters, a whole buffer.
    The memory is padded, so that one collective exchanges all slices. `ShardRange` gives the elements of a parameter in
    a shard. With ``shard_gradients`` a buffer has the layout of a bucket of the `DistributedDataParallel`, so that a
    rank's shard of the parameters and its slice of the reduced gradients are the same elements. If all ranks are on one
    machine, they share one copy of the buffer (`CommonMemory`), and the updated shards need no gather.

    Args:
        members: The parameters in their order, of one device and dtype. Their values are copied to ``flat``, and their
            ``data`` become views of it.
        allocate: Allocates the memory.
        num_ranks: The number of shards.
        owner: The rank that owns the whole buffer. Default: all have slices, see `shard_bounds`.

    Attributes:
        flat: The parameters.
        padded: ``flat``, and the memory after it up to the end of the last of the equal slices.
        written: The same parameters, where the owner of a shard writes them.
    """

    def __init__(self, members: list[Member], allocate: Allocate, *, num_ranks: int, owner: int | None = None) -> None:
        self.parameters, self.ranges = [param for param, _ in members], [part for _, part in members]
        numel = sum(part.numel for part in self.ranges)
        memory = allocate(padded_numel(numel, self.parameters[0].itemsize, num_ranks), self.parameters[0])
        self.common = memory if isinstance(memory, CommonMemory) else None
        self.padded, self.written = (memory, memory) if isinstance(memory, Tensor) else (memory.own, memory.shared)
        self.flat, self.has_equal_slices = self.padded[:numel], owner is None
        # Ranges are computed once, because every step needs them.
        owned = [(0, numel if rank == owner else 0) for rank in range(num_ranks)]
        self.bounds = shard_bounds(numel, num_ranks, self.flat.itemsize) if owner is None else owned
        self.ranges_of_rank = [cut_ranges(self.ranges, *bounds) for bounds in self.bounds]
        self._parameter_of = {part.parameter: parameter for parameter, part in members}
        # Strides such as channels_last are kept: kernels and gradients rely on them. Later conversions to other strides
        # are undone, since the optimizer's state and the buckets have this order of elements.
        self._views = cut_views(self.flat, self.parameters)
        self._pointers: list[int] = []
        self.take_back()

    def take_back(self) -> None:
        """Copy the parameters to the buffer, and make them views of it again; do nothing if they still are.

        Raises:
            ConfigurationError: They now have another device or dtype.
        """
        if [parameter.data_ptr() for parameter in self.parameters] == self._pointers:
            return
        for parameter in self.parameters:
            if parameter.device != self.flat.device or parameter.dtype != self.flat.dtype:
                raise ConfigurationError(
                    f"Parameters were {self.flat.dtype} on {self.flat.device} when the optimizer was made, and are now "
                    f"{parameter.dtype} on {parameter.device}.\nMove or convert the model before the optimizer is made."
                )
        with torch.no_grad():
            foreach_copy_(self._views, [parameter.detach() for parameter in self.parameters])
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self._pointers = [parameter.data_ptr() for parameter in self.parameters]

    def shard_of(self, rank: int, flat: Tensor | None = None) -> Tensor:
        """Return the shard of ``rank``, of this buffer or of another ``flat`` tensor with its layout."""
        start, stop = self.bounds[rank]
        return (self.flat if flat is None else flat)[start:stop]

    def gradients_of(self, rank: int) -> Tensor:
        """Return a copy of the gradients of the shard of ``rank``; uninitialized where there is no gradient.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        # Not zeros: segments without a gradient are not read.
        shard = torch.empty_like(self.shard_of(rank))
        targets, sources = [], []
        for offset, part in with_offsets(self.ranges_of_rank[rank]):
            parameter = self._parameter_of[part.parameter]
            if parameter.grad is not None:
                targets.append(shard[offset : offset + part.numel])
                sources.append(flatten_like(parameter.grad, parameter)[part.start : part.stop])
        if targets:
            foreach_copy_(targets, sources)
        return shard


def partition_evenly(members: Sequence[Member], num_ranks: int, allocate: Allocate) -> list[FlatBuffer]:
    """Put parameters into flat buffers with an equal slice for each rank. Collective if ``allocate`` is."""
    parts = in_chunks(members, _kind_of, lambda member: member[0].nbytes, _MAX_BUFFER_BYTES)
    return [FlatBuffer(_aligned(part), allocate, num_ranks=num_ranks) for part in parts]


def partition_by_parameter(members: Sequence[Member], num_ranks: int, allocate: Allocate) -> list[FlatBuffer]:
    """Put parameters into flat buffers that belong to one rank each. Collective if ``allocate`` is.

    Ranks own nearly equal numbers of elements, as far as the sizes of the parameters allow: parameters are assigned
    from the largest to the smallest, each to the rank with the fewest elements so far.
    """
    buffers = []
    for group in grouped(members, _kind_of).values():
        owned: list[list[Member]] = [[] for _ in range(num_ranks)]
        loads = [0] * num_ranks
        # All ranks compute this, so ties must be resolved equally: by index (the sort is stable), never by address.
        for member in sorted(group, key=lambda member: -member[1].numel):
            rank = loads.index(min(loads))
            owned[rank].append(member)
            loads[rank] += member[1].numel
        for owner, owned_members in enumerate(owned):
            if owned_members:
                ordered = _aligned(sorted(owned_members, key=lambda member: member[1]))
                buffers.append(FlatBuffer(ordered, allocate, num_ranks=num_ranks, owner=owner))
    return buffers


def _aligned(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member[0].nbytes % ALIGNMENT_BYTES > 0)  # stable


def _kind_of(member: Member) -> tuple[torch.device, torch.dtype, bool]:
    return member[0].device, member[0].dtype, member[0].requires_grad  # frozen ones take no part in steps


# --- The gather of updated parameters


# The collectives that bring the parameters of a buffer.
Gather = tuple[FlatBuffer, list[Work]]

# By id of a parameter that is being received: waits for it.
_arrivals: dict[int, Callable[[], None]] = {}


class _ArrivingParameter(nn.Parameter):
    """A parameter that is being received; torch calls this class for each operation on it, as for lazy parameters."""

    @classmethod
    @keep_out_of_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _wait_for(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _wait_for(values: Iterable[object]) -> None:
    for value in values:
        if type(value) is _ArrivingParameter:
            _arrivals.get(id(value), lambda: None)()
            value.__class__ = nn.Parameter  # type: ignore[assignment]  # also of a copy, which is in no buffer


@contextmanager
def wait_late(gathers: Sequence[Gather], device: torch.device) -> Iterator[None]:
    """Inside the block, wait for parameters when they are first used; at its end, for the rest.

    [Note: late waits]
    A layer that uses its parameters waits for their buffer, and computes while later buffers are received. A hook
    before the forward of every module is not enough: a model may use a parameter outside of the forward of the module
    that has it, as attention does, or a loss with a penalty on the weights. So until a buffer is waited for, its
    parameters are of a class of which torch reports each operation. The hook is for code that does not go through
    torch's functions in Python, such as kernels in C++ and TorchScript, and for streams: if a model uses several, the
    others began to wait for the current one before that waited for some buffer, so modules on them wait for all.
    """
    main = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def finish(buffer: FlatBuffer, works: Sequence[Work]) -> None:
        for stream in (nullcontext(), main or nullcontext()):  # the current stream may be another one
            with stream:
                wait_for_gather(works)
        for parameter in buffer.parameters:
            parameter.__class__ = nn.Parameter
            _arrivals.pop(id(parameter), None)

    def before_forward(layer: nn.Module, _inputs: Any) -> None:
        own = own_parameters(layer).values()
        if isinstance(layer, jit.ScriptModule) or (own and main and torch.accelerator.current_stream(device) != main):
            for gather in gathers:
                finish(*gather)
        _wait_for(own)

    hook = nn.modules.module.register_module_forward_pre_hook(before_forward)
    try:
        for buffer, works in gathers:
            for parameter in buffer.parameters:
                parameter.__class__ = _ArrivingParameter
                _arrivals[id(parameter)] = partial(finish, buffer, works)
        yield
    finally:
        hook.remove()
        for buffer, _ in gathers:
            _wait_for(buffer.parameters)


def stop_waiting(parameters: Iterable[nn.Parameter]) -> None:
    """Do not wait for parameters any more: the ranks that were to send them are gone."""
    for parameter in parameters:
        if _arrivals.pop(id(parameter), None) is not None:
            parameter.__class__ = nn.Parameter


def wait_for_gather(works: Iterable[Work]) -> None:
    """Block until updated parameters have arrived (on CUDA: the current stream waits)."""
    for work in works:
        wait_for(work, "all_gather of updated parameters")


def start_parameter_gather(buffers: Sequence[FlatBuffer], group: Group, *, alone: bool) -> list[Gather]:
    """Start to send this rank's shards of ``buffers``, and to receive the others'.

    Collective: every rank, in the same order. Does not block.

    All ranks then have the same bits, since each element comes from one rank.

    Args:
        buffers: The same on every rank. Buffers that the ranks share need no communication.
        group: The ranks that take part.
        alone: Whether the caller waits next, and has nothing else to do.
    """
    gathers: list[Gather] = []
    for buffer in (buffer for buffer in buffers if group.size() > 1 and buffer.common is None):
        if buffer.has_equal_slices and collectives.has_all_gather(group, buffer.flat.device):
            works = [collectives.all_gather_slices(buffer.padded, group=group, alone=alone)]
        else:
            send = partial(collectives.broadcast_async, group=group, alone=alone)
            shards = [(rank, buffer.shard_of(rank)) for rank in range(group.size())]
            works = [send(shard, src=rank) for rank, shard in shards if shard.numel()]
        gathers.append((buffer, works))
    return gathers


# --- The optimizer of one rank's shard

# The state of an optimizer for a parameter, by name: tensors with an entry per element, and numbers for the whole.
Entries = Mapping[str, Any]

# The name of the parameter's own elements, beside the entries of the optimizer.
VALUE = "value of the parameter"

# Returns the saved state of these elements, with flat tensors for entries per element; None: there is none.
Read = Callable[[ShardRange], Entries | None]

# Optimizers whose new value of an element depends only on that element, its gradient, its state, and numbers that are
# the same for the whole parameter. Subclasses may do more, so they are not included.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "ASGD", "Rprop"]
)

_REFUSED = {torch.optim.LBFGS: "works with all parameters together", torch.optim.SparseAdam: "is for sparse gradients"}

# torch's optimizers on the CPU pass over a parameter once for each operation, a dozen times in Adam. For a segment of
# millions of elements each pass reads from memory. So on CPUs segments are split so that value, gradient and state fit
# in a core's cache together, and only the first pass reads from memory. Fused and foreach kernels pass once, or over
# all parameters in turn; for them, and on other devices, segments are not split.
# Four times that, for Adam's value, gradient and two averages, fit in the second-level cache of most cores.
_CHUNK_BYTES = 2**18


def works_on_slices(optimizer_class: type[Optimizer], elementwise: bool | None = None) -> bool:
    """Return whether an optimizer may work on flat slices, without knowing the parameters in them.

    Args:
        optimizer_class: Its class.
        elementwise: The caller's setting; None: known for torch's classes, else the class attribute ``elementwise``.

    Raises:
        ConfigurationError: It is not an optimizer class, or one that cannot be sharded.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigurationError(
            f"optimizer_class is {optimizer_class!r}, which is not an optimizer class.\n"
            "Give the class and its arguments: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)."
        )
    for refused, why in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ConfigurationError(
                f"{optimizer_class.__name__} {why}, so it cannot be divided among ranks.\n"
                "Use it as it is, without ZeroRedundancyOptimizer."
            )
    if elementwise is not None:
        return elementwise
    return bool(getattr(optimizer_class, "elementwise", optimizer_class in ELEMENTWISE))


def options_of(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups without their parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in param_groups]


class Segment(NamedTuple):
    """Neighbouring elements of a shard that an optimizer sees as one parameter.

    [Note: segments]
    The optimizer of a shard sees *segments* as its parameters: neighbouring elements of a shard, from one param group,
    and from parameters that have received the same updates so far. A new segment begins only where the param group
    changes, so a step is a few kernels, however many parameters there are. An optimizer that is not element-wise gets
    the whole parameters that this rank owns: each is a segment.

    Attributes:
        buffer: The index of its flat buffer.
        offset: Its start in this rank's shard of the buffer.
        ranges: Its ranges of parameters.
        parameter: Its elements, for the optimizer.
    """

    buffer: int
    offset: int
    ranges: Sequence[ShardRange]
    parameter: nn.Parameter

    def cut(self, entries: Entries, start: int, numel: int) -> dict[str, Any]:
        """Return the part of its state for ``numel`` of its elements: views of entries per element, and the numbers."""
        whole = self.parameter.numel()
        return {
            name: value[start : start + numel] if is_flat(value) and value.numel() == whole else value
            for name, value in entries.items()
        }


Options = Sequence[Mapping[str, Any]]
Make = Callable[[list[dict[str, Any]]], Optimizer]


class ShardOptimizer:
    """The optimizer of one rank's shards of flat buffers.

    Args:
        make: Creates the optimizer from param groups.
        buffers: Partitioned among the ranks; shards hold whole parameters unless it is element-wise.
        rank: The owner of the shards.
        options: By param group, its options without "params".
        elementwise: Whether it works on flat slices.

    Attributes:
        optimizer: The optimizer that does the work.
    """

    def __init__(self, make: Make, buffers: list[FlatBuffer], rank: int, options: Options, elementwise: bool) -> None:
        self._make, self._elementwise = make, elementwise
        self._segments: list[Segment] = []
        self._shards = [buffer.shard_of(rank, buffer.written) for buffer in buffers]
        self._parameters = {
            part.parameter: parameter
            for buffer in buffers
            for parameter, part in zip(buffer.parameters, buffer.ranges, strict=True)
        }
        passes_once = any(settings.get("fused") or settings.get("foreach") for settings in options)
        self._chunks: list[tuple[int, int, list[ShardRange]]] = []
        for index, buffer in enumerate(buffers):
            ranges, shard = buffer.ranges_of_rank[rank], self._shards[index]
            # See `_CHUNK_BYTES`.
            is_cut = elementwise and shard.is_cpu and not passes_once
            size = max(_CHUNK_BYTES // shard.itemsize if is_cut else shard.numel(), 1)
            for start in range(0, shard.numel(), size):
                self._chunks.append((index, start, cut_ranges(ranges, start, start + size)))
        self._install(options, lambda shard_range: shard_range.group)

    def set_gradients(self, gradients: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Give an element-wise optimizer its gradients, until `drop_gradients`; others take ``param.grad``.

        Args:
            gradients: By buffer, like this rank's shard.
            present: By parameter, whether it has a gradient; what ``gradients`` holds for others does not matter.
        """
        if not all(present):
            # A parameter without a gradient must not change, also not by weight decay or momentum, and its number of
            # steps (Adam's bias correction) must not advance. So if only some parameters of a segment have a gradient,
            # the segment and its state are split permanently. Nothing is saved and restored, and the result is exact.
            self._divide(present.__getitem__)
        for segment in self._segments:
            if present[segment.ranges[0].parameter]:
                end = segment.offset + segment.parameter.numel()
                segment.parameter.grad = gradients[segment.buffer][segment.offset : end]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer has now."""
        return [segment.parameter.grad for segment in self._segments if segment.parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Release the gradients of an element-wise optimizer."""
        if self._elementwise:
            for segment in self._segments:
                segment.parameter.grad = None

    def forget(self, indices: Container[int]) -> None:
        """Drop the state of these parameters."""
        self._divide(indices.__contains__)
        for segment in self._segments:
            if segment.ranges[0].parameter in indices:
                self.optimizer.state.pop(segment.parameter, None)

    def state(self) -> Iterator[tuple[ShardRange, dict[str, Any]]]:
        """Yield the optimizer's state, by range: views of entries per element, and numbers for the whole parameter."""
        for segment in self._segments:
            if segment.parameter in self.optimizer.state:
                entries = self.optimizer.state[segment.parameter]
                for offset, part in with_offsets(segment.ranges):
                    yield part, segment.cut(entries, offset, part.numel)

    def values(self) -> Iterator[tuple[ShardRange, dict[str, Any]]]:
        """Yield the elements themselves, by range, in the same form."""
        for segment in self._segments:
            for offset, part in with_offsets(segment.ranges):
                yield part, segment.cut({VALUE: segment.parameter.detach()}, offset, part.numel)

    def load(self, read: Read, options: Options) -> None:
        """Create the optimizer again, with the state that ``read`` returns and these options, by param group."""
        states = {shard_range: read(shard_range) for _, _, ranges in self._chunks for shard_range in ranges}
        # Only ranges with the same number of steps may share a segment.
        self._install(options, lambda shard_range: (shard_range.group, _numbers_of(states[shard_range])))
        # load_state_dict() moves entries to the device and dtype that the optimizer needs; it identifies parameters by
        # their number over all groups.
        saved = self.optimizer.state_dict()
        in_order = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        number_of = {id(parameter): number for number, parameter in enumerate(in_order)}
        for segment in self._segments:
            # The entries are released one by one: there may be no room for two copies of the shard.
            parts = [entries for shard_range in segment.ranges if (entries := states.pop(shard_range)) is not None]
            if parts:  # else keep what the constructor may have created
                saved["state"][number_of[id(segment.parameter)]] = {
                    name: torch.cat([part[name] for part in parts]) if is_flat(value) else _copy(value)
                    for name, value in parts[0].items()
                }
        self.optimizer.load_state_dict(saved)

    def _install(self, options: Options, key: Callable[[ShardRange], object]) -> None:
        """Create segments of neighbours with the same ``key``, and an optimizer for them."""
        self._segments = []
        for buffer, offset, ranges in self._chunks:
            run_key = key if self._elementwise else None  # None: each range is a whole parameter and a segment
            runs = [list(run) for _, run in groupby(ranges, key=run_key)]
            self._segments += self._make_segments(buffer, offset, runs)
        groups: list[dict[str, Any]] = [{**settings, "params": []} for settings in options]
        for segment in self._segments:
            groups[segment.ranges[0].group]["params"].append(segment.parameter)
        self.optimizer = self._make(groups)

    def _make_segments(self, buffer: int, offset: int, runs: Sequence[Sequence[ShardRange]]) -> list[Segment]:
        """Return a segment for each run of ranges, back to back from ``offset`` in this rank's shard of a buffer."""
        segments = []
        for run in runs:
            end = offset + sum(shard_range.numel for shard_range in run)
            if self._elementwise:
                parameter = nn.Parameter(self._shards[buffer][offset:end].detach())
            else:
                parameter = self._parameters[run[0].parameter]
            segments.append(Segment(buffer, offset, run, parameter))
            offset = end
        return segments

    def _divide(self, key: Callable[[int], bool]) -> None:
        """Split the segments that hold parameters with different keys."""
        segments: list[Segment] = []
        for segment in self._segments:
            runs = [list(run) for _, run in groupby(segment.ranges, key=lambda part: key(part.parameter))]
            segments += [segment] if len(runs) == 1 else self._split(segment, runs)
        self._segments = segments

    def _split(self, segment: Segment, runs: list[list[ShardRange]]) -> list[Segment]:
        parts = self._make_segments(segment.buffer, segment.offset, runs)
        group = self.optimizer.param_groups[segment.ranges[0].group]["params"]
        # By identity: == of tensors compares elements.
        place = next(index for index, parameter in enumerate(group) if parameter is segment.parameter)
        group[place : place + 1] = [part.parameter for part in parts]
        if segment.parameter in self.optimizer.state:
            entries = self.optimizer.state.pop(segment.parameter)
            for part in parts:
                cut = segment.cut(entries, part.offset - segment.offset, part.parameter.numel())
                # copies, so that parts do not keep the memory of the whole
                self.optimizer.state[part.parameter] = {name: _copy(value) for name, value in cut.items()}
        return parts


@contextmanager
def in_eval_mode(optimizer: Any, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, ``tensors``, its parameters, have the values that the ``eval()`` of an optimizer sets.

    Its ``train()`` would restore them up to rounding: here they have the same bits again.
    """
    with torch.no_grad():
        trained = [tensor.detach().clone() for tensor in tensors]
        try:
            optimizer.eval()
            yield
        finally:
            optimizer.train()
            for tensor, value in zip(tensors, trained, strict=True):
                tensor.copy_(value)


def is_flat(value: object) -> bool:
    """Return whether an entry of an element-wise optimizer's state is per element."""
    return isinstance(value, Tensor) and value.dim() == 1


def _copy(value: Any, device: str | None = None) -> Any:
    """Return a copy of a tensor, which does not keep the storage of a view, or a value of another type."""
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def _numbers_of(entries: Entries | None) -> object:
    """Return the numbers that must be equal in all ranges of one segment."""
    return entries and [
        (name, "elements" if is_flat(value) else float(value) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(entries.items())
    ]


# --- the state in torch's format, assembled from all ranks' shards and split into them --------------------------------

# Names of entries for the whole parameter; needed only if the parameter itself is one number.
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def gather_full_state(
    held: Iterable[tuple[ShardRange, Entries]], parameters: Sequence[Tensor], flat: bool, group: Group, to: int | None
) -> dict[int, dict[str, Any]] | None:
    """Return the state of all ranks in torch's format, on the CPU, on rank ``to`` (None: on all); None on the others.

    Torch's format maps the index of a parameter to a dict with tensors of the parameter's shape and with numbers. A
    rank keeps elements of a parameter in memory order (`ShardRange`): tensors of one dimension, and numbers that are
    the same for all elements. An optimizer that is not element-wise keeps torch's entries for whole parameters
    (``flat`` is False here and in `read_from_full`).

    Collective: every rank. Blocks.
    """
    own_rows = [
        [index, start, stop, {name: _copy(value, "cpu") for name, value in entries.items()}]
        for (index, start, stop, _), entries in held
    ]
    shards = collectives.gather_states(own_rows, group=group, device=parameters[0].device, to=to)
    if not shards:
        return None
    state: dict[int, dict[str, Any]] = {}
    for index, start, stop, entries in sorted((row for rank in shards for row in rank), key=lambda row: row[0]):
        parameter, whole = parameters[index], state.setdefault(index, {})
        for name, value in entries.items():
            if not (flat and is_flat(value)):
                whole[name] = value
                continue
            if name not in whole:
                # In the memory order of the parameter, so that a shard is a slice of it.
                whole[name] = view_like(torch.empty(parameter.numel(), dtype=value.dtype), parameter)
            flatten_like(whole[name], parameter)[start:stop] = value
    return state


def read_from_full(state: Mapping[int, Entries], parameters: Sequence[Tensor], *, flat: bool) -> Read:
    """Return a function that reads ranges of elements from a state in torch's format."""

    def read(wanted: ShardRange) -> Entries | None:
        entries, parameter = state.get(wanted.parameter), parameters[wanted.parameter]
        if entries is None or not flat:
            return entries
        return {
            name: flatten_like(value, parameter)[wanted.start : wanted.stop]
            if isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() or name not in SCALARS)
            else value
            for name, value in entries.items()
        }

    return read
