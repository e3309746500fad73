"""Collectives that move pieces of flat tensors: from each rank to each, and from each to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.collectives import NO_TIMEOUT, Group, backend_name


def all_gather_flat_async(output: Tensor, tensor: Tensor, *, group: Group) -> Any:
    """Start to put every rank's ``tensor`` into ``output``, one after the other by rank; return what to ``wait()`` for.

    Collective: every rank, in the same order, with the same shape and dtype. Does not block.

    Args:
        output: One-dimensional, contiguous, as many elements as all tensors together.
        tensor: One-dimensional and contiguous; the same shape and dtype on every rank.
        group: The ranks that take part.
    """
    options = dist.distributed_c10d.AllgatherOptions()
    return _Keeping(group._allgather_base(_real_flat(output), _real_flat(tensor), options), tensor)


def all_to_all_async(
    output: Tensor, tensor: Tensor, *, output_sizes: Sequence[int], input_sizes: Sequence[int], group: Group
) -> Any:
    """Start to send a piece of ``tensor`` to each rank and to receive one from each; return what to ``wait()`` for.

    Collective: every rank, in the same order. Does not block.

    Args:
        output: One-dimensional, contiguous: what the ranks sent, one after the other by rank.
        tensor: One-dimensional, contiguous: what goes to each rank, one after the other by rank.
        output_sizes: Elements that each rank sends here.
        input_sizes: Elements that go to each rank.
        group: The ranks that take part.
    """
    width = 2 if tensor.is_complex() else 1
    output_splits, input_splits = ([size * width for size in sizes] for sizes in (output_sizes, input_sizes))
    if tensor.is_cuda and backend_name(group) == "gloo":  # which exchanges pieces of CPU tensors only
        received = torch.empty_like(output, device="cpu")
        tensor = tensor.cpu()
        group.alltoall_base(
            _real_flat(received), _real_flat(tensor), output_splits, input_splits, dist.AllToAllOptions()
        ).wait(NO_TIMEOUT)
        output.copy_(received)
        return _Keeping(None)
    work = group.alltoall_base(
        _real_flat(output), _real_flat(tensor), output_splits, input_splits, dist.AllToAllOptions()
    )
    return _Keeping(work, tensor)


def _real_flat(tensor: Tensor) -> Tensor:
    """Return a view that backends without complex numbers can move."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)


class _Keeping:
    """Work under way, with the tensors that it reads: not every backend keeps them itself."""

    def __init__(self, work: Any, *tensors: Tensor) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Block until complete (on CUDA: the current stream waits)."""
        if self._work is not None:
            self._work.wait(NO_TIMEOUT)
        self._tensors = ()
