"""The buffers of a model whose virtual shards run one after the other, or in several places at once.

[Note: buffers]
Each virtual shard starts from the buffers that the step started with. Afterwards a floating-point buffer that any of
them changed becomes the mean of what they all left in it, weighted by samples and summed in the tree in float64; so
batch norm's statistics see every sample. Any other buffer that was changed becomes what the first shard with samples
left in it: a counter counts steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Group, broadcast_coalesced
from lockstep.errors import ConfigurationError
from lockstep.parallel.tree.exchange import Exchange, Placement
from lockstep.parallel.tree.layout import Row


@dataclass(frozen=True)
class _Home:
    """Where a buffer hangs."""

    module: nn.Module
    name: str

    def get(self) -> Tensor | None:
        return self.module._buffers[self.name]


class ShardBuffers:
    """What the virtual shards of this process leave in the buffers of ``model``, and what becomes of it.

    Args:
        model: With all of its buffers.
        leaves: The virtual shards of this process.

    Raises:
        ConfigurationError: A buffer requires a gradient.
    """

    def __init__(self, model: nn.Module, leaves: range) -> None:
        self._model, self._leaves = model, leaves
        self.names = [name for name, _ in model.named_buffers()]
        for name, buffer in model.named_buffers():
            if buffer.requires_grad:
                raise ConfigurationError(
                    f"The buffer {name} requires a gradient, which reproducible does not sum.\nMake it a parameter."
                )
        self._homes: dict[int, tuple[nn.Module, list[_Home]]] = {}  # the module, so that its id is not another's
        self._objects: list[Tensor] = []
        self._start: list[Tensor] = []
        self._left: dict[int, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Keep the buffers that the step starts with."""
        self._objects = [self._value(home, name) for home, name in zip(self._of(self._model), self.names, strict=True)]
        self._start = [buffer.clone() for buffer in self._objects]
        self._left = {}

    def record(self, leaf: int, module: nn.Module) -> None:
        """Keep what a virtual shard left in the buffers of ``module``, which is the model or a replica of it.

        Raises:
            ConfigurationError: A buffer has another shape or dtype than before.
        """
        left: list[Tensor | None] = []
        for home, name, start in zip(self._of(module), self.names, self._start, strict=True):
            value = self._value(home, name)
            if value.shape != start.shape or value.dtype != start.dtype:
                raise ConfigurationError(
                    f"The buffer {name} changed from {_describe(start)} to {_describe(value)} in forward.\n"
                    "With reproducible, buffers keep their shape and dtype. Keep what grows in a plain attribute."
                )
            left.append(None if torch.equal(value.to(start.device), start) else value.detach().clone())
        self._left[leaf] = left

    def restore(self) -> None:
        """Give the model the buffers that the step started with."""
        for home, value, start in zip(self._of(self._model), self._objects, self._start, strict=True):
            if home.get() is not value or not torch.equal(value, start):
                home.module._buffers[home.name] = value
                _overwrite(value, start)

    def changed(self) -> list[bool]:
        """Return for each buffer whether a shard of this process changed it."""
        return [any(left[index] is not None for left in self._left.values()) for index in range(len(self.names))]

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
                    _overwrite(self._objects[index], self._at(first, index))
            if group is not None:
                broadcast_coalesced([self._objects[index] for index in others], group=group, src=owner)

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
            _overwrite(self._objects[index], piece.view(self._start[index].shape))

    def _at(self, leaf: int, index: int) -> Tensor:
        """Return what a shard left in a buffer, changed or not."""
        left = self._left[leaf][index]
        return self._start[index] if left is None else left

    def _of(self, module: nn.Module) -> list[_Home]:
        """Return where the buffers hang in ``module``. Found once: walking a large model takes long."""
        if id(module) not in self._homes:
            paths = [full_name.rpartition(".") for full_name in self.names]
            homes = [_Home(module.get_submodule(path), name) for path, _, name in paths]
            self._homes[id(module)] = module, homes
        return self._homes[id(module)][1]

    def _value(self, home: _Home, name: str) -> Tensor:
        value = home.get()
        if value is None:
            raise ConfigurationError(f"The buffer {name} became None in forward.\nWith reproducible, buffers stay.")
        return value


@torch.no_grad()
def _overwrite(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
