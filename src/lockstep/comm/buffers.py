"""Memory for what the engines send again and again."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.collectives import Group
from lockstep.comm.shm.allocate import empty_shared


def empty_buffer(numel: int, *, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """Return a flat tensor with arbitrary values, in memory where ``group`` reduces and gathers it without copies.

    On shm that is memory which all ranks map; elsewhere, or if there is too little of it, ordinary memory, on all ranks
    alike. Either way the tensor behaves like any other, and its memory is freed with the last reference to it.

    Collective on shm: every rank, in the same order, with the same arguments. Blocks until all have come.

    Args:
        numel: Elements.
        dtype: Of the elements.
        device: Where the tensor lies.
        group: The ranks that exchange it.
    """
    if device.type == "cpu":
        return empty_shared(numel, dtype=dtype, group=group)
    return torch.empty(numel, dtype=dtype, device=device)
