"""The buffers of a model whose virtual shards run one after the other, or in several places at once.

[Note: buffers]
Each virtual shard starts from the buffers that the step started with. Afterwards a floating-point buffer that any of
them changed becomes the mean of what they all left in it, weighted by samples and summed in the tree in float64; so
batch norm's statistics see every sample. Any other buffer that was changed becomes what the first shard with samples
left in it: a counter counts steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Group, broadcast_coalesced
from lockstep.errors import ConfigurationError
from lockstep.parallel.tree.exchange import Exchange, Placement
from lockstep.parallel.tree.layout import Row
from lockstep.train.buffers import KeptBuffers, overwrite


class ShardBuffers:
    """What the virtual shards of this process leave in the buffers of ``model``, and what becomes of it.

    Args:
        model: With all of its buffers.
        leaves: The virtual shards of this process.

    Raises:
        ConfigurationError: A buffer requires a gradient.
    """

    def __init__(self, model: nn.Module, leaves: range) -> None:
        self._leaves = leaves
        self._kept = KeptBuffers(model)
        for name, buffer in model.named_buffers():
            if buffer.requires_grad:
                raise ConfigurationError(
                    f"The buffer {name} requires a gradient, which reproducible does not sum.\nMake it a parameter."
                )
        self._left: dict[int, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Keep the buffers that the step starts with."""
        self._kept.keep()
        self._left = {}

    @property
    def _start(self) -> list[Tensor]:
        return self._kept.values

    def record(self, leaf: int, module: nn.Module) -> None:
        """Keep what a virtual shard left in the buffers of ``module``, which is the model or a replica of it.

        Raises:
            ConfigurationError: A buffer has another shape or dtype than before.
        """
        left: list[Tensor | None] = []
        for value, name, start in zip(self._kept.read(module), self._kept.names, self._start, strict=True):
            if value.shape != start.shape or value.dtype != start.dtype:
                raise ConfigurationError(
                    f"The buffer {name} changed from {_describe(start)} to {_describe(value)} in forward.\n"
                    "With reproducible, buffers keep their shape and dtype. Keep what grows in a plain attribute."
                )
            left.append(None if torch.equal(value.to(start.device), start) else value.detach().clone())
        self._left[leaf] = left

    def restore(self) -> None:
        """Give the model the buffers that the step started with."""
        self._kept.restore()

    def changed(self) -> list[bool]:
        """Return for each buffer whether a shard of this process changed it."""
        return [any(left[index] is not None for left in self._left.values()) for index in range(len(self._kept.names))]

    def finish(
        self,
        changed: Sequence[bool],
        sizes: Mapping[int, int],
        placement: Placement,
        exchange: Exchange,
        group: Group | None,
    ) -> None:
        """Set the buffers of the model, which are those that the step started with, to what the step makes of them.

        Collective if there is a group: every rank. Blocks until complete.

        Args:
            changed: For each buffer whether any shard of any rank changed it; alike on all ranks.
            sizes: The samples of every virtual shard that has any.
            placement: Of the shards over the ranks.
            exchange: Sums between the ranks.
            group: The ranks, or None if it is only this process.
        """
        floating = [i for i, start in enumerate(self._start) if changed[i] and start.is_floating_point()]
        others = [i for i, start in enumerate(self._start) if changed[i] and not start.is_floating_point()]
        if floating:
            self._average(floating, sizes, placement, exchange, 1 if group is None else group.size())
        if others:
            first = min(sizes)
            owner = next(rank for rank, leaves in enumerate(placement.ranges) if first in leaves)
            if first in self._left:
                for index in others:
                    overwrite(self._kept.objects[index], self._at(first, index))
            if group is not None:
                broadcast_coalesced([self._kept.objects[index] for index in others], group=group, src=owner)

    def _average(
        self, indices: Sequence[int], sizes: Mapping[int, int], placement: Placement, exchange: Exchange, num_ranks: int
    ) -> None:
        device = self._start[indices[0]].device
        numel = sum(self._start[index].numel() for index in indices)
        padding = -numel % num_ranks
        flats: dict[range, Tensor] = {}
        for leaf in self._leaves:
            flat = torch.zeros(numel + padding, dtype=torch.float64, device=device)
            if leaf in self._left:
                pieces = [self._at(leaf, index).to(device, torch.float64).flatten() for index in indices]
                torch.cat(pieces, out=flat[:numel]).mul_(sizes[leaf])
            flats[range(leaf, leaf + 1)] = flat
        nodes = placement.tree.roots(self._leaves)
        parts = {node: Row([placement.tree.combine(flats, Tensor.add_, root=node)], []) for node in nodes}
        total = exchange.sum([parts]).flats[0][:numel] / sum(sizes.values())
        for index, piece in zip(indices, total.split([self._start[i].numel() for i in indices]), strict=True):
            overwrite(self._kept.objects[index], piece.view(self._start[index].shape))

    def _at(self, leaf: int, index: int) -> Tensor:
        """Return what a shard left in a buffer, changed or not."""
        left = self._left[leaf][index]
        return self._start[index] if left is None else left


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
