"""An optimizer of one owner's slices of flat parameters.

[Note: segments]
What the optimizer inside sees as a parameter is a *segment*: neighbouring elements of a slice, of one param group, and
of parameters that have received the same updates so far. There are as many segments as param groups take turns in a
slice, so a step is a few kernels, however many parameters there are.

A parameter without a gradient must not be touched, not by weight decay or momentum either, and its number of steps
(Adam's bias correction) must stand still. So the first time that only some parameters of a segment have a gradient,
the segment is cut there, and its state with it: from then on both parts have numbers of their own. Nothing is saved and
put back, and the result is exact.

[Note: cache]
torch's optimizers on the CPU pass over a parameter once for each operation, a dozen times in Adam. For a segment of
millions of elements all of that comes from memory. So segments are cut there to a size of which value, gradient and
state fit in a core's cache together, and the passes but the first find them there. Fused and foreach kernels pass once,
or over all parameters in turn; for them, and on other devices, segments stay long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.parallel.zero.recipe import Recipe
from lockstep.parallel.zero.spans import Span, cut_spans, with_offsets

Entries = Mapping[str, Any]
"""What an optimizer keeps of a parameter, by name: per element in tensors, for all of it in numbers."""


_CHUNK_BYTES = 2**18
"""Four times that, for Adam's value, gradient and two averages, fit in the second-level cache of most cores."""


class _Chunk(NamedTuple):
    """What may become one segment: where it begins in which slice, and what it is made of."""

    piece: int
    offset: int
    spans: tuple[Span, ...]


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
    spans: tuple[Span, ...]
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
        recipe: Recipe,
        pieces: Sequence[Tensor],
        spans: Sequence[Sequence[Span]],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._recipe, self._pieces = recipe, list(pieces)
        self._chunks = [
            _Chunk(index, start, tuple(cut_spans(spans[index], start, start + size)))
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

    def state(self) -> Iterator[tuple[Span, dict[str, Any]]]:
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

    def load(self, read: Callable[[Span], Entries | None], options: Sequence[Mapping[str, Any]]) -> None:
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

    def _install(self, options: list[dict[str, Any]], alike: Callable[[Span], object]) -> None:
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

    def _segments_of(self, piece: int, offset: int, runs: Sequence[Sequence[Span]]) -> list[Segment]:
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

    def _cut(self, segment: Segment, runs: list[list[Span]]) -> list[Segment]:
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
