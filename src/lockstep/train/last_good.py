"""The state of a run as it was some steps ago, in host memory: each rank's own part of it, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.fully_shard import local_part
from lockstep.parallel.dp.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train.buffers import BufferSnapshot


class LastGood:
    """A copy of what this rank holds of parameters, buffers and optimizer state.

    No rank needs another for it, however the state is divided; all keep and restore theirs at the same steps.

    Args:
        model: The bare model.
        optimizer: Of its parameters.

    Attributes:
        num_steps: That were done when it was kept.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = list(model.parameters())
        self._buffers = BufferSnapshot(model)
        self._optimizer = optimizer
        self._values: list[Tensor] = []
        self._give_back: Callable[[], None] | None = None
        self.num_steps = self._num_updates = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was kept yet."""
        return self._give_back is None

    def keep(self, num_steps: int, num_updates: int) -> None:
        """Copy the state as it is now, after so many steps and updates. Blocks."""
        self.num_steps, self._num_updates = num_steps, num_updates
        self._give_back = keep_optimizer(self._optimizer)
        self._values = [_copy(local_part(parameter.detach())) for parameter in self._parameters]
        self._buffers.keep()

    @torch.no_grad()
    def restore(self) -> int:
        """Give model and optimizer what was copied; return the number of updates at that time. Blocks."""
        assert self._give_back is not None
        self._give_back()
        for parameter, value in zip(self._parameters, self._values, strict=True):
            local_part(parameter).copy_(value)
        self._buffers.restore()
        return self._num_updates


def keep_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    """Return what gives ``optimizer`` the state that this process holds of it now. Blocks."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()  # for parameters too
        return partial(optimizer.load_pieces, optimizer.sharded_state_dict()["pieces"])
    if isinstance(optimizer, ShardedOptimizer):
        return partial(optimizer.load_state_dict, copy.deepcopy(optimizer.state_dict()))
    state = {
        parameter: {
            name: _copy(local_part(value)) if isinstance(value, Tensor) else value for name, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    return partial(_give_back, optimizer, state)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _give_back(optimizer: Optimizer, kept: dict[Tensor, dict[str, Any]]) -> None:
    for parameter in [each for each in optimizer.state if each not in kept]:
        del optimizer.state[parameter]
    for parameter, entries in kept.items():
        state = optimizer.state[parameter]
        for name, value in entries.items():
            if isinstance(value, Tensor):
                local_part(state[name]).copy_(value)
            else:
                state[name] = value
