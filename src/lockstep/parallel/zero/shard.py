"""The optimizer of one rank's shard.

[Note: segments]
What the optimizer inside sees as a parameter is a *segment*: neighbouring elements of a shard, of one param group, and
of parameters that have received the same updates so far. There are as many segments as param groups take turns in a
shard, so a step is a few kernels, however many parameters there are.

A parameter without a gradient must not be touched, not by weight decay or momentum either, and its number of steps
(Adam's bias correction) must stand still. So the first time that only some parameters of a segment have a gradient,
the segment is split there, and its state with it: from then on both parts have numbers of their own. Nothing is saved
and put back, and the result is exact.

An optimizer that is not element-wise gets the parameters that this rank owns, whole: each is a segment.

[Note: cache]
torch's optimizers on the CPU pass over a parameter once for each operation, a dozen times in Adam. For a segment of
millions of elements all of that comes from memory. So segments are cut there to a size of which value, gradient and
state fit in a core's cache together, and the passes but the first find them there. Fused and foreach kernels pass once,
or over all parameters in turn; for them, and on other devices, segments stay long.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigurationError
from lockstep.parallel.zero.partition import FlatBuffer, ShardRange, cut_ranges, with_offsets

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
