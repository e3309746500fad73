"""Collectives on flat tensors of which each rank has a slice, in place; and states that travel whole."""

from __future__ import annotations

import io
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.collectives import NO_TIMEOUT, Group, all_gather, broadcast, is_native
from lockstep.comm.shm.process_group import ShmProcessGroup


class Waitable(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Block until it is complete (on CUDA: let the current stream wait)."""

    def is_completed(self) -> bool:
        """Tell whether it is complete."""


def scatters(group: Group, device: torch.device) -> bool:
    """Tell whether a reduce-scatter costs ``group`` less than an all-reduce; Gloo does the one with the other."""
    if isinstance(group, ShmProcessGroup):
        return True
    return is_native(group) and "gloo" not in group._get_backend(device).name().lower()


def gathers(group: Group, device: torch.device) -> bool:
    """Tell whether ``group`` gathers flat tensors of ``device``; Gloo only broadcasts those of GPUs."""
    return device.type == "cpu" or scatters(group, device)


def reduce_scatter_slices(flat: Tensor, *, group: Group, alone: bool = False) -> Waitable:
    """Start to replace this rank's slice of ``flat`` by its sum over all ranks; the other slices become arbitrary.

    Collective: every rank, in the same order. Does not block.

    Args:
        flat: One-dimensional, contiguous, its size a multiple of the number of ranks; the same on every rank.
        group: The ranks that take part, each with the slice of its number.
        alone: Whether the caller waits at once and has nothing else to do: on shm the work is then its own.
    """
    real = _real(flat)
    options = _on_its_own(dist.ReduceScatterOptions(), real, alone)
    work: Waitable = group._reduce_scatter_base(_own(real, group), real, options)
    return work


def all_gather_slices(flat: Tensor, *, group: Group, alone: bool = False) -> Waitable:
    """Start to replace the other ranks' slices of ``flat`` by what these ranks have there; see above.

    Collective: every rank, in the same order. Does not block.
    """
    real = _real(flat)
    options = _on_its_own(dist.distributed_c10d.AllgatherOptions(), real, alone)
    work: Waitable = group._allgather_base(real, _own(real, group), options)
    return work


def broadcast_async(tensor: Tensor, *, group: Group, src: int, alone: bool = False) -> Waitable:
    """Start to overwrite ``tensor``, which is contiguous, with that of rank ``src``; see above."""
    options = _on_its_own(dist.BroadcastOptions(), tensor, alone)
    options.rootRank = src
    work: Waitable = group.broadcast([_real(tensor)], options)
    return work


def all_reduce_work(tensor: Tensor, *, group: Group, alone: bool = False) -> Waitable:
    """Start to replace ``tensor``, which is contiguous, by its sum over all ranks; see above."""
    work: Waitable = group.allreduce([_real(tensor)], _on_its_own(dist.AllreduceOptions(), tensor, alone))
    return work


def wait_for(work: Waitable) -> None:
    """Block until ``work`` is complete, as long as the group's time-out allows."""
    work.wait(NO_TIMEOUT)  # type: ignore[call-arg]


def gather_states(state: Any, *, group: Group, device: torch.device, to: int | None) -> list[Any] | None:
    """Return every rank's ``state`` by rank, on the CPU, on rank ``to`` (None: on all); None on the others.

    Collective: every rank, in the same order. Blocks until complete. Ranks send one after the other, so that only who
    keeps the states needs memory for more than one.

    Args:
        state: Tensors, numbers and strings, in lists and dicts.
        group: The ranks that take part.
        device: Where the bytes lie while they travel: a CUDA device for NCCL.
        to: Who gets them.
    """
    keeps = to is None or to == group.rank()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    mine = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    del buffer
    sizes = [int(size) for size in all_gather(torch.tensor([mine.numel()], device=device), group=group)]
    states = []
    for rank, size in enumerate(sizes):
        data = mine.to(device) if rank == group.rank() else torch.empty(size, dtype=torch.uint8, device=device)
        broadcast(data, group=group, src=rank)
        if keeps:
            file = io.BytesIO(data.cpu().numpy().tobytes())
            states.append(torch.load(file, map_location="cpu", weights_only=True))
    return states if keeps else None


def _on_its_own(options: Any, tensor: Tensor, alone: bool) -> Any:
    if alone and tensor.is_cpu:
        options.asyncOp = False
    return options


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _own(flat: Tensor, group: Group) -> Tensor:
    size = flat.numel() // group.size()
    return flat[group.rank() * size : (group.rank() + 1) * size]
