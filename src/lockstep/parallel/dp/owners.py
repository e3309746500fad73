"""One replica's part of a divided optimizer: it runs in that replica's thread and keeps its state on its device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.parallel.dp.slices import GradientSlices
from lockstep.parallel.zero.partition import FlatBuffer, FlatShard, OptimizerFactory, ShardRange, WholeShard


class Owner(ABC):
    """Updates what one replica owns. Abstract: flat slices, or whole parameters."""

    shard: FlatShard | WholeShard

    @abstractmethod
    def step(self, present: Sequence[bool], kwargs: Mapping[str, Any]) -> None:
        """Update the module's parameters, as far as they are this replica's, from their gradients.

        Args:
            present: By parameter of the optimizer, whether it has a gradient.
            kwargs: What the optimizer's own ``step`` gets.
        """


@final
class SliceOwner(Owner):
    """Owns a slice of each buffer in which the parameters lie.

    On the buffers' own device the optimizer works on the slices themselves. Elsewhere it works on copies, which are
    brought up to date before each step, since a script may write to the parameters at any time.

    Args:
        number: Of the replica.
        device: Its device.
        buffers: All parameters.
        recipe: Of an element-wise optimizer.
        options: By param group, its options without "params".
        divided: The gradients, if each owner has its slice of them already; None: they are in ``param.grad``.
    """

    def __init__(
        self,
        number: int,
        device: torch.device,
        buffers: Sequence[FlatBuffer],
        recipe: OptimizerFactory,
        options: Sequence[Mapping[str, Any]],
        divided: GradientSlices | None = None,
    ) -> None:
        self._number, self._buffers, self._divided = number, list(buffers), divided
        self._slices = [buffer.slice_of(number) for buffer in buffers]
        self._pieces = [each if each.device == device else each.to(device) for each in self._slices]
        self._gradients = [] if divided else [torch.empty_like(each) for each in self._slices]
        self.shard = self._flat = FlatShard(
            recipe, self._pieces, [buffer.spans_of(number) for buffer in buffers], options
        )

    @override
    @torch.no_grad()
    def step(self, present: Sequence[bool], kwargs: Mapping[str, Any]) -> None:
        remote = [index for index, piece in enumerate(self._pieces) if piece is not self._slices[index]]
        for index in remote:
            self._pieces[index].copy_(self._slices[index], non_blocking=True)
        gradients = self._gathered() if self._divided is None else self._divided.of(self._number)
        self._flat.set_gradients(gradients, present)
        try:
            self.shard.optimizer.step(**kwargs)
        finally:
            self._flat.drop_gradients()
        for index in remote:
            self._slices[index].copy_(self._pieces[index], non_blocking=True)

    def _gathered(self) -> list[Tensor]:
        for buffer, gradient in zip(self._buffers, self._gradients, strict=True):
            buffer.gather_gradients(self._number, gradient)
        pairs = zip(self._gradients, self._pieces, strict=True)
        return [gradient.to(piece.device, non_blocking=True) for gradient, piece in pairs]


@final
class WholeOwner(Owner):
    """Owns whole parameters; on another device than theirs it works on copies, see `SliceOwner`.

    Args:
        device: That of the replica.
        parameters: Those of the module that it owns.
        spans: Which they are.
        recipe: Of any optimizer.
        options: By param group, its options without "params".
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Sequence[nn.Parameter],
        spans: Sequence[ShardRange],
        recipe: OptimizerFactory,
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._parameters = list(parameters)
        self._own = [
            each if each.device == device else nn.Parameter(each.detach().to(device), requires_grad=each.requires_grad)
            for each in parameters
        ]
        self.shard = WholeShard(recipe, self._own, spans, options)

    @override
    @torch.no_grad()
    def step(self, present: Sequence[bool], kwargs: Mapping[str, Any]) -> None:
        copies = [(own, theirs) for own, theirs in zip(self._own, self._parameters, strict=True) if own is not theirs]
        for own, theirs in copies:
            own.copy_(theirs)
            own.grad = None if theirs.grad is None else theirs.grad.to(own.device)
        self.shard.optimizer.step(**kwargs)
        for own, theirs in copies:
            own.grad = None
            theirs.copy_(own)
