"""A snapshot of the buffers of a model, for computations that must not change them."""

from typing import cast

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError


class BufferSnapshot:
    """A snapshot of the buffers of ``model``.

    Attributes:
        names: The names of all buffers, each buffer once.
        objects: The tensors that were the buffers at the time of the snapshot.
        values: Copies of their values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names = [name for name, _ in model.named_buffers()]
        self.objects: list[Tensor] = []
        self.values: list[Tensor] = []
        # By id of the module; with the module itself, so that its id is not reused.
        self._owners: dict[int, tuple[nn.Module, list[tuple[nn.Module, str]]]] = {}

    def current(self) -> list[Tensor]:
        """Return the buffers of the model."""
        return self.read(self._model)

    def keep(self) -> None:
        """Take a snapshot."""
        self.objects = self.read(self._model)
        self.values = [buffer.clone() for buffer in self.objects]

    @torch.no_grad()
    def restore_where(self, condition: Tensor) -> None:
        """Restore the values of the snapshot if ``condition``, a 0-dimensional tensor, holds. Does not block."""
        for now, value in zip(self.read(self._model), self.values, strict=True):
            now.copy_(torch.where(condition, value, now))

    def restore(self) -> None:
        """Restore the buffers of the snapshot: the same tensors with the same values."""
        for (owner, name), buffer, value in zip(self._owners_in(self._model), self.objects, self.values, strict=True):
            if owner._buffers[name] is not buffer or not torch.equal(buffer, value):
                owner._buffers[name] = buffer
                overwrite_buffer(buffer, value)

    def read(self, module: nn.Module) -> list[Tensor]:
        """Return the current buffers of ``module``, which is the model or a replica of it.

        Raises:
            ConfigurationError: A buffer has become None.
        """
        buffers = [owner._buffers[name] for owner, name in self._owners_in(module)]
        for buffer, name in zip(buffers, self.names, strict=True):
            if buffer is None:
                raise ConfigurationError(f"The buffer {name} became None in forward.\nStore it in a plain attribute.")
        return cast(list[Tensor], buffers)

    def _owners_in(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the submodule and the local name of each buffer; cached, because the lookup is slow."""
        if id(module) not in self._owners:
            paths = [full_name.rpartition(".") for full_name in self.names]
            self._owners[id(module)] = module, [(module.get_submodule(path), name) for path, _, name in paths]
        return self._owners[id(module)][1]


@torch.no_grad()
def overwrite_buffer(buffer: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``buffer``."""
    buffer.copy_(value)
