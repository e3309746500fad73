"""Where the elements of parameters lie in flat memory: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.parallel.views import view_like


@dataclass(frozen=True)
class Span:
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


def slice_bounds(numel: int, num_owners: int) -> list[tuple[int, int]]:
    """Return each owner's slice of ``numel`` elements: equal ones, the remainder at the end is the last one's."""
    size = numel // num_owners
    starts = [owner * size for owner in range(num_owners)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def even_end(numel: int, num_owners: int) -> int:
    """Return where the remainder begins: up to there all slices are equal."""
    return numel - numel % num_owners


def cut_spans(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return what lies from element ``start`` to ``stop`` of a flat buffer that ``spans`` fill back to back."""
    inside, position = [], 0
    for span in spans:
        first, last = max(start, position), min(stop, position + span.numel)
        if first < last:
            shift = span.start - position
            inside.append(replace(span, start=first + shift, stop=last + shift))
        position += span.numel
    return inside


def with_offsets(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
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
