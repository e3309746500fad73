"""torch's ``fully_shard`` (FSDP2): the operations that ``fit`` needs of it, and its collectives timed."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.accelerator import is_on_meta, keeps_objects, move
from lockstep.comm.collectives import Group, counted_wait


class _TimedCollective:
    """A collective of ``fully_shard`` on CPUs, where it blocks: it is marked and counted as waiting.

    Args:
        operation: Its name, for the watchdog.
        inner: What carries it out.
    """

    def __init__(self, operation: str, inner: Any) -> None:
        self._operation, self._inner = operation, inner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for its input or result."""
        return self._inner.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Collective: every rank."""
        with counted_wait(self._operation):
            return self._inner(*args, **kwargs)


def fully_shard_units(root: nn.Module, units: Iterable[nn.Module], *, group: Group, device: torch.device) -> bool:
    """Divide the parameters of ``root`` among the ranks: those of each unit together, then the rest.

    Parameters become ``DTensor``, on ``device``. Those of a unit are whole on every rank only while it computes.

    Collective: every rank, with modules of the same shapes. Blocks.

    Returns:
        Whether what a rank waits for the others in forward and backward is counted, in `lockstep.activity`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    # Otherwise `fully_shard` moves the units one by one; what is on the meta device stays there.
    if not keeps_objects(device) and not is_on_meta(root):
        move(root, device)
    mesh = DeviceMesh.from_group(group, device.type)
    divided = [*units, root]
    # Units first: the root then takes what is left.
    for unit in divided:
        fully_shard(unit, mesh=mesh)
    # On a GPU the collectives do not block the host, so nothing would be known by timing them.
    if device.type != "cpu":
        return False
    for unit in divided:
        unit.set_custom_all_gather(_TimedCollective("all_gather of fully_shard", DefaultAllGather()))  # type: ignore[operator]
        unit.set_custom_reduce_scatter(_TimedCollective("reduce_scatter of fully_shard", DefaultReduceScatter()))  # type: ignore[operator]
    return True


def sum_gradients(root: nn.Module, *, over_ranks: bool) -> None:
    """Choose whether the next backward reduces gradients over the ranks, or adds to what this rank has."""
    root.set_requires_gradient_sync(over_ranks)  # type: ignore[operator]


def is_sharded(tensor: object) -> bool:
    """Return whether a rank holds only a part of ``tensor``."""
    # Its import takes a second; where nobody has imported it, there are no such tensors.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, also of one for which ``fully_shard`` has made a class that inherits from it."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a divided tensor, which shares its memory; others as they are."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def local_chunk(tensor: Any) -> tuple[tuple[int, ...], Tensor]:
    """Return this rank's part of a sharded tensor, which shares its memory, and at which offsets it begins."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tensor.to_local()


@torch.no_grad()
def copy_part(tensor: Any, source: Tensor) -> None:
    """Copy to a tensor from one of its shape, or to this rank's part of a divided tensor."""
    if is_sharded(tensor):
        offsets, tensor = local_chunk(tensor)
        source = source[tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))]
    tensor.copy_(source)


def whole(tensor: Any) -> Any:
    """Return all of a divided tensor; anything else as it is. Collective: every rank. Blocks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
