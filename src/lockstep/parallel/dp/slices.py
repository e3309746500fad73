"""Gradients that stay where an optimizer divided among the replicas needs them: each slice with its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.gradients import Gradients, needs_autograd
from lockstep.parallel.dp.transport import Transport
from lockstep.parallel.zero.partition import FlatBuffer


class GradientSlices:
    """The sums of gradients, by buffer and owner: none at first, and after `drop`.

    Args:
        buffers: In which the parameters lie; parameters in no buffer get their gradients as ever.
        devices: Of the owners.

    Attributes:
        devices: Of the owners.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], devices: Sequence[torch.device]) -> None:
        self._buffers, self.devices = list(buffers), tuple(devices)
        self._slices: list[list[Tensor]] = []
        self._present: set[int] = set()

    def drop(self) -> None:
        """Let go of the gradients."""
        self._slices, self._present = [], set()

    def of(self, owner: int) -> list[Tensor]:
        """Return the slices of an owner, on its device, one a buffer; zeros before there is a gradient."""
        if not self._slices:
            device = self.devices[owner]
            return [torch.zeros_like(buffer.slice_of(owner), device=device) for buffer in self._buffers]
        return [slices[owner] for slices in self._slices]

    def tensors(self) -> list[Tensor]:
        """Return all slices."""
        return [each for slices in self._slices for each in slices]

    def has(self, parameter: int) -> bool:
        """Whether a parameter of the optimizer has a gradient here."""
        return parameter in self._present

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor], rows: Sequence[Gradients], transport: Transport) -> list[Gradients]:
        """Add the replicas' gradients of what lies in the buffers, in the fixed tree, each owner its slice.

        A parameter that only some replicas used counts as zero for the others.

        Args:
            weights: The module's.
            rows: Of the first replicas, one gradient a weight.
            transport: Between the owners' devices.

        Returns:
            ``rows`` without what was taken.

        Raises:
            ConfigurationError: A parameter has hooks, which would see nothing, or a sparse gradient.
        """
        place_of = {id(weight): index for index, weight in enumerate(weights)}
        left = [list(row) for row in rows]
        taken = []
        for buffer in self._buffers:
            places = [place_of[id(parameter)] for parameter in buffer.parameters]
            self._check(buffer, places, rows)
            flats = [_packed(buffer, [row[place] for place in places], device) for row, device in self._with(rows)]
            taken.append([_alone(each) for each in transport.reduce_scatter(flats, buffer.bounds)])
            for span, place in zip(buffer.spans, places, strict=True):
                if any(row[place] is not None for row in rows):
                    self._present.add(span.parameter)
            for row in left:
                for place in places:
                    row[place] = None
        if self._slices:
            for old, new in zip(self._slices, taken, strict=True):
                for total, each in zip(old, new, strict=True):
                    total.add_(each)
        else:
            self._slices = taken
        return left

    def _with(self, rows: Sequence[Gradients]) -> list[tuple[Gradients, torch.device]]:
        return list(zip(rows, self.devices, strict=False))

    def _check(self, buffer: FlatBuffer, places: Sequence[int], rows: Sequence[Gradients]) -> None:
        for parameter, span, place in zip(buffer.parameters, buffer.spans, places, strict=True):
            if needs_autograd(parameter):
                raise ConfigurationError(
                    f"Parameter {span.parameter} of the optimizer has a gradient hook, but with shard_gradients=True "
                    "there is no whole gradient.\nLeave shard_gradients out, or remove the hook."
                )
            if any(gradient is not None and gradient.is_sparse for gradient in (row[place] for row in rows)):
                raise ConfigurationError(
                    f"Parameter {span.parameter} of the optimizer received a sparse gradient, which cannot be divided."
                    "\nBuild nn.Embedding with sparse=False, or give it an optimizer of its own."
                )


def _alone(piece: Tensor) -> Tensor:
    """Return ``piece`` in memory of its own size, so that it does not keep a whole row alive."""
    return piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()


def _packed(buffer: FlatBuffer, gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the gradients of one replica, laid out as the buffer is; zeros where there is none."""
    flat = torch.empty_like(buffer.flat, device=device)
    views = buffer.views_of(flat)
    found = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    absent = [view for view, gradient in zip(views, gradients, strict=True) if gradient is None]
    if absent:
        torch._foreach_zero_(absent)
    if found:
        torch._foreach_copy_([view for view, _ in found], [gradient for _, gradient in found])
    return flat
