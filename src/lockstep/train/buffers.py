"""The buffers of a model, put back to what they were after something that must leave no traces in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError


@dataclass(frozen=True)
class BufferSlot:
    """Where a buffer hangs."""

    module: nn.Module
    name: str

    def get(self) -> Tensor | None:
        """Return it."""
        return self.module._buffers[self.name]


class BufferSnapshot:
    """The buffers of ``model``: what they were, and a way back to it.

    Attributes:
        names: Of all of them, each once.
        objects: The tensors that the model had when they were kept.
        values: Copies of what they held.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names = [name for name, _ in model.named_buffers()]
        self.objects: list[Tensor] = []
        self.values: list[Tensor] = []
        self._homes: dict[int, tuple[nn.Module, list[BufferSlot]]] = {}  # the module, so that its id is not another's

    def keep(self) -> None:
        """Keep the buffers that the model has now."""
        self.objects = self.read(self._model)
        self.values = [buffer.clone() for buffer in self.objects]

    def restore(self) -> None:
        """Give the model the buffers that were kept: the same tensors with the same contents."""
        for home, buffer, value in zip(self._homes_in(self._model), self.objects, self.values, strict=True):
            if home.get() is not buffer or not torch.equal(buffer, value):
                home.module._buffers[home.name] = buffer
                overwrite_buffer(buffer, value)

    def read(self, module: nn.Module) -> list[Tensor]:
        """Return the buffers that ``module``, the model or a replica of it, has now.

        Raises:
            ConfigurationError: One is None that was a tensor before.
        """
        buffers = []
        for home, name in zip(self._homes_in(module), self.names, strict=True):
            buffer = home.get()
            if buffer is None:
                raise ConfigurationError(
                    f"The buffer {name} became None in forward.\nKeep what comes and goes in a plain attribute."
                )
            buffers.append(buffer)
        return buffers

    def _homes_in(self, module: nn.Module) -> list[BufferSlot]:
        """Return where the buffers hang in ``module``. Found once: walking a large model takes long."""
        if id(module) not in self._homes:
            paths = [full_name.rpartition(".") for full_name in self.names]
            homes = [BufferSlot(module.get_submodule(path), name) for path, _, name in paths]
            self._homes[id(module)] = module, homes
        return self._homes[id(module)][1]


@torch.no_grad()
def overwrite_buffer(buffer: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``buffer``."""
    buffer.copy_(value)
