"""Keeps parameters (once) and buffers (around ``forward``) equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from lockstep.comm.collectives import Group, RepeatedBroadcast, broadcast_coalesced
from lockstep.parallel.ddp.agreement import check_models_agree

BufferHook = Callable[[Any, dict[str, Tensor]], list[Future[Any]] | None]


@dataclass(frozen=True)
class RegisteredBufferHook:
    """A user's own way to synchronise buffers, before or after ``forward``."""

    hook: BufferHook
    state: object
    after_forward: bool


class ModelSync:
    """Compares and broadcasts the state of ``module``, without what is named in ``ignore``."""

    def __init__(self, module: nn.Module, ignore: set[str], group: Group, device: torch.device) -> None:
        self.registered: RegisteredBufferHook | None = None
        self._module = module
        self._ignore = ignore
        self._group = group
        self._device = device
        self._broadcast = RepeatedBroadcast(group)
        # Asked once: walking a large model takes long. A module that assigns a buffer anew changes what its dict holds.
        self._homes = [self._home(name) for name in self.named_buffers()]
        self.has_buffers = bool(self._homes)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, each once."""
        return {name: value for name, value in self._module.named_parameters() if name not in self._ignore}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name. To be asked anew each time, since modules may assign new ones."""
        return {name: value for name, value in self._module.named_buffers() if name not in self._ignore}

    def _home(self, full_name: str) -> tuple[dict[str, Any], str]:
        """Return the dict that holds a buffer, and its name there."""
        module_name, _, name = full_name.rpartition(".")
        return self._module.get_submodule(module_name)._buffers, name

    def check(self, *, with_buffers: bool) -> None:
        """Raise ModelMismatch on every rank if shapes or dtypes differ. Collective: every rank. Blocks."""
        buffers = self.named_buffers().items() if with_buffers else ()
        check_models_agree(self.named_parameters().items(), buffers, group=self._group, device=self._device)

    def broadcast(self, *, src: int, with_buffers: bool) -> None:
        """Overwrite parameters and buffers with those of rank ``src``. Collective: every rank. Blocks."""
        tensors = [value.detach() for value in self.named_parameters().values()]
        if with_buffers:
            tensors += [value.detach() for value in self.named_buffers().values()]
        broadcast_coalesced(tensors, group=self._group, src=src)

    @torch.no_grad()
    def sync_buffers(self, *, after_forward: bool, src: int) -> list[Future[Any]]:
        """Synchronise buffers, if this is the moment for it; return futures to wait for at the end of backward.

        Collective: every rank. Blocks until complete, except for what a registered hook returns as futures.
        """
        if self.registered is None:
            if not after_forward:
                buffers = (home[name] for home, name in self._homes)
                self._broadcast([buffer for buffer in buffers if buffer is not None], src=src)
            return []
        if self.registered.after_forward is not after_forward:
            return []
        return self.registered.hook(self.registered.state, self.named_buffers()) or []
