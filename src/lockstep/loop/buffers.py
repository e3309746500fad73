"""Buffers, which evaluation, virtual shards, skipped steps and attempts that are done again must not change."""

from __future__ import annotations

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
        self.names = [name for name, _ in model.named_buffers()]
        self.objects: list[Tensor] = []
        self.values: list[Tensor] = []
        paths = [full_name.rpartition(".") for full_name in self.names]
        self._owners = [(model.get_submodule(path), name) for path, _, name in paths]

    def current(self) -> list[Tensor]:
        """Return the buffers of the model.

        Raises:
            ConfigurationError: A buffer has become None.
        """
        buffers = [owner._buffers[name] for owner, name in self._owners]
        for buffer, name in zip(buffers, self.names, strict=True):
            if buffer is None:
                raise ConfigurationError(f"The buffer {name} became None in forward.\nStore it in a plain attribute.")
        return cast(list[Tensor], buffers)

    def keep(self) -> None:
        """Take a snapshot."""
        self.objects = self.current()
        self.values = [buffer.clone() for buffer in self.objects]

    @torch.no_grad()
    def restore_where(self, condition: Tensor) -> None:
        """Restore the values of the snapshot if ``condition``, a 0-dimensional tensor, holds. Does not block."""
        for now, value in zip(self.current(), self.values, strict=True):
            now.copy_(torch.where(condition, value, now))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers of the snapshot: the same tensors with the same values."""
        for (owner, name), buffer, value in zip(self._owners, self.objects, self.values, strict=True):
            if owner._buffers[name] is not buffer or not torch.equal(buffer, value):
                owner._buffers[name] = buffer
                buffer.copy_(value)
