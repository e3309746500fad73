"""What happens to collectives: they are late, or slow, on their way to whatever carries them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.comm.collectives import Group, all_reduce_async
from lockstep.comm.shm.process_group import ShmProcessGroup

_CALLS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter", "alltoall"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single", "send"),
)

BeforeSend = Callable[[str, int, int], None]
"""Called with the operation, the bytes that this rank passes to it, and the size of the group."""


def watch(before: BeforeSend) -> None:
    """Call ``before`` ahead of every collective of this process, for good.

    torch's DistributedDataParallel starts its own in C++. So where it has no communication hook it is given one that
    does the same from Python.
    """
    for kind in (Group, ShmProcessGroup):
        for name in _CALLS:
            if name in vars(kind):
                setattr(kind, name, _watched(getattr(kind, name), name, before))

    def hook_torchs(module: nn.Module, _args: Any) -> None:
        is_torchs = type(module).__module__.startswith("torch.") and type(module).__name__ == "DistributedDataParallel"
        if is_torchs and not module._comm_hooks:
            # A lambda, as torch checks annotations and takes those that are strings to be wrong.
            module.register_comm_hook(module.process_group, lambda group, bucket: _mean(group, bucket))  # type: ignore[operator]

    register_module_forward_pre_hook(hook_torchs)


def _watched(method: Any, name: str, before: BeforeSend) -> Any:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        before(name, _num_bytes((*args, *kwargs.values())), group.size())
        return method(group, *args, **kwargs)

    return call


def _mean(group: Any, bucket: Any) -> Any:
    """Do what torch's DistributedDataParallel does without a hook."""
    future = all_reduce_async(bucket.buffer().div_(group.size()), group=group)
    return future.then(lambda done: _first(done.value()))


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list | tuple) else found


def _num_bytes(args: Any) -> int:
    """Return the size of the largest tensor among nested arguments: of an all-gather that is what comes of it."""
    if isinstance(args, Tensor):
        return args.numel() * args.element_size()
    if isinstance(args, list | tuple):
        sizes = [_num_bytes(arg) for arg in args]
        tensors = all(isinstance(arg, Tensor) for arg in args)
        return sum(sizes) if tensors else max(sizes, default=0)
    return 0


def seconds_on_link(name: str, num_bytes: int, size: int, mbit: float) -> float:
    """Return how long a collective keeps the link of a rank busy that sends and receives at ``mbit``.

    An all-reduce passes everything twice, but for a rank's own share; everything else once.
    """
    passes = 2 if name.startswith("allreduce") else 1
    return passes * num_bytes * (size - 1) / max(size, 1) * 8 / (mbit * 1e6)
