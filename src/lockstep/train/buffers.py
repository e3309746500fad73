"""The buffers of a model, put back to what they were after something that must leave no traces in them."""

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError


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
        # By id of the module; with the module itself, so that its id is not another's.
        self._owners: dict[int, tuple[nn.Module, list[tuple[nn.Module, str]]]] = {}

    def keep(self) -> None:
        """Keep the buffers that the model has now."""
        self.objects = self.read(self._model)
        self.values = [buffer.clone() for buffer in self.objects]

    def restore(self) -> None:
        """Give the model the buffers that were kept: the same tensors with the same contents."""
        for (owner, name), buffer, value in zip(self._owners_in(self._model), self.objects, self.values, strict=True):
            if owner._buffers[name] is not buffer or not torch.equal(buffer, value):
                owner._buffers[name] = buffer
                overwrite_buffer(buffer, value)

    def read(self, module: nn.Module) -> list[Tensor]:
        """Return the buffers that ``module``, the model or a replica of it, has now.

        Raises:
            ConfigurationError: One is None that was a tensor before.
        """
        buffers = []
        for (owner, name), full_name in zip(self._owners_in(module), self.names, strict=True):
            buffer = owner._buffers[name]
            if buffer is None:
                raise ConfigurationError(
                    f"The buffer {full_name} became None in forward.\nKeep what comes and goes in a plain attribute."
                )
            buffers.append(buffer)
        return buffers

    def _owners_in(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the submodule that has each buffer, and its name there; looked up once, as it takes long."""
        if id(module) not in self._owners:
            paths = [full_name.rpartition(".") for full_name in self.names]
            self._owners[id(module)] = module, [(module.get_submodule(path), name) for path, _, name in paths]
        return self._owners[id(module)][1]


@torch.no_grad()
def overwrite_buffer(buffer: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``buffer``."""
    buffer.copy_(value)
