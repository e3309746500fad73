"""A group on the backend shm beside the pool's Gloo group."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.comm.collectives import empty_buffer
from lockstep.comm.shm import register_when_needed
from lockstep.comm.shm.process_group import ShmProcessGroup


@contextmanager
def shm_group(ranks: Sequence[int] | None = None, *, timeout_s: float = 20.0) -> Iterator[ShmProcessGroup]:
    register_when_needed()
    group = dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=timeout_s))
    try:
        yield group
    except BaseException:
        if isinstance(group, ShmProcessGroup):
            group.abort()
        raise
    if isinstance(group, ShmProcessGroup):
        dist.destroy_process_group(group)


def empty_shared(shape, *, dtype, group):
    """Return a tensor of any shape in memory that all ranks map."""
    sizes = (shape,) if isinstance(shape, int) else shape
    numel = math.prod(sizes)
    return empty_buffer(numel, dtype=dtype, device=torch.device("cpu"), group=group).view(sizes)
