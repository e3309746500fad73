"""How one use of a layer talks to the same layer on the other ranks.

[Note: the same layer everywhere]
Collectives are matched by their order alone. Where a layer runs on some ranks only, or ranks use layers in different
orders, statistics of two layers would be merged without an error if they have as many channels. So each vector
carries the layer's place in the model, which `DistributedDataParallel` assigns. On the CPU it is compared; on other
devices reading it would make the processor wait for the device in every layer.

Backends cope badly with tensors of different sizes: Gloo ends the process. So the first use of a layer compares the
number of channels.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Group, all_gather, all_reduce
from lockstep.errors import CollectiveError
from lockstep.parallel.batchnorm.engine import Event, engine_of

_ADVICE = (
    "Every rank must run the same SyncBatchNorm layers in the same order, on as many channels, forward and backward; "
    "if another rank ended or failed, look at the first error of the job."
)


class Place(NamedTuple):
    """Where a layer is in its model; not assigned in a model that is not wrapped."""

    number: int = -1
    name: str = "a SyncBatchNorm layer"


_compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The layers that are known to have as many channels on every rank."""


class Exchange:
    """One forward of ``layer`` and its backward, as the ranks of ``group`` do them together.

    Args:
        layer: The layer.
        place: Where it is in the model.
        group: The ranks that take part.
    """

    def __init__(self, layer: nn.Module, place: Place, group: Group) -> None:
        self._layer, self._place, self._group = layer, place, group
        self._engine = engine_of(layer)
        self._announces = self._engine is not None and self._engine.is_open
        self._step = 0 if self._engine is None else self._engine.step

    @property
    def unit(self) -> float:
        """What this rank's gradients will be multiplied by, relative to those of the other ranks."""
        return 1.0 if self._engine is None else self._engine.unit

    def announce(self, event: Event) -> None:
        """Tell ranks without a batch, if there may be any. Collective then: every rank. Blocks until complete."""
        if self._announces:
            assert self._engine is not None
            self._engine.announce(event, self._layer, self._step)

    def compare_channels(self, num_channels: int, device: torch.device) -> None:
        """Make sure, once for each layer, that it has as many channels on every rank.

        Collective the first time: every rank. Blocks until complete.

        Raises:
            CollectiveError: On every rank: it has not, or other ranks do something else.
        """
        if self._layer in _compared:
            return
        mine = torch.tensor([num_channels, self._place.number], device=device)
        try:
            rows = torch.stack(all_gather(mine, group=self._group)).tolist()
        except RuntimeError as error:
            raise self._failed("forward", error) from error
        self._check([number for _, number in rows], "forward")
        if any(other != num_channels for other, _ in rows):
            channels = ", ".join(f"{other} on rank {rank}" for rank, (other, _) in enumerate(rows))
            raise self._failed("forward", f"it has different numbers of channels: {channels}.")
        _compared.add(self._layer)

    def gather(self, vector: Tensor) -> Tensor:
        """Return every rank's ``vector``, one below the other.

        Collective: every rank. Blocks until complete (on CUDA: the current stream waits).

        Raises:
            CollectiveError: Other ranks run another layer, or ended, or did not take part in time.
        """
        try:
            rows = torch.stack(all_gather(self._marked(vector), group=self._group))
        except RuntimeError as error:
            raise self._failed("forward", error) from error
        if vector.device.type == "cpu":
            self._check(rows[:, -1].tolist(), "forward")
        return rows[:, :-1]

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of every rank's ``vector``.

        Collective: every rank. Blocks until complete (on CUDA: the current stream waits).

        Raises:
            CollectiveError: Other ranks run another layer, or ended, or did not take part in time.
        """
        marked = self._marked(vector)
        try:
            all_reduce(marked, group=self._group)
        except RuntimeError as error:
            raise self._failed("backward", error) from error
        if vector.device.type == "cpu":
            mean = float(marked[-1]) / self._group.size()
            self._check([mean], "backward")
        return marked[:-1]

    def _marked(self, vector: Tensor) -> Tensor:
        return torch.cat([vector, vector.new_full((1,), self._place.number)])

    def _check(self, numbers: list[float], phase: str) -> None:
        strangers = [rank for rank, number in enumerate(numbers) if number != self._place.number]
        if strangers:
            raise self._failed(phase, "other ranks run another layer.")

    def _failed(self, phase: str, cause: object) -> CollectiveError:
        return CollectiveError(
            f"Rank {self._group.rank()}: the {phase} of {self._place.name} could not be done together with the other "
            f"ranks: {cause}\n{_ADVICE}"
        )
