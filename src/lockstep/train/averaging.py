"""The exponential moving average of the weights, `Task.ema`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lockstep.comm.fully_shard import local_part
from lockstep.train.checkpoints.model_state import plain_name, read_tensors


class AveragedWeights:
    """Averages the trained parameters of ``model`` as torch's ``AveragedModel`` does with ``get_ema_multi_avg_fn``.

    Not an ``AveragedModel``, which holds a second model: buffers and frozen parameters are those of ``model``, and of
    a sharded parameter each rank averages its shard. All ranks hold the same, so nothing is exchanged.

    [Note: when weights are averaged]
    The average follows each update, but not at once: parameters may still be gathered, and on a device the gradient is
    checked in the next step. So it is updated before the next update, or before it is used.

    Args:
        model: The model without wrappers.
        decay: Weight of the average so far in each update.

    Attributes:
        values: By the names of the parameters; empty before the first update, which copies them.
        is_due: Whether parameters have changed since the last update.
        is_swapped: Whether the model has the averages, and ``values`` has its parameters.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._average = model, get_ema_multi_avg_fn(decay)
        self.values: dict[str, Tensor] = {}
        self.is_due = self.is_swapped = False

    def _parameters(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return {plain_name(name): each.detach() for name, each in named if each.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the parameters. Does not block."""
        self.is_due, parameters = False, self._parameters()
        if not self.values:
            self.values = {name: each.clone() for name, each in parameters.items()}
            return
        averages = [local_part(self.values[name]) for name in parameters]
        self._average(averages, [local_part(each) for each in parameters.values()], 0)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the model has the averages."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and averages, one after the other: the parameters stay where they are in memory."""
        self.is_swapped = not self.is_swapped
        for name, parameter in self._parameters().items() if self.values else ():
            kept = parameter.clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name; those of tied parameters under each of their names."""
        names = {id(each): plain_name(name) for name, each in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {
            plain_name(name): self.values[names[id(each)]] for name, each in every if names[id(each)] in self.values
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the averages of a checkpoint, or of another rank; without any, from the parameters.

        Raises:
            ValueError: They belong to another model.
        """
        self.is_due, parameters = False, self._parameters() if state else {}
        if missing := parameters.keys() - state.keys():
            raise ValueError(f"it has no averaged weights of {min(missing)}")
        self.values = {name: each.clone().copy_(read_tensors(state[name], each)) for name, each in parameters.items()}
