"""torch's ``fully_shard`` (FSDP2): the operations that ``fit`` uses, and timing of its collectives."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.accelerator import is_on_meta, keeps_objects, move
from lockstep.comm.collectives import Group, counted_wait
from lockstep.torch_internals import fully_shard_all_gather, fully_shard_reduce_scatter


class _TimedCollective:
    """A collective of ``fully_shard`` on CPUs. It blocks there, so its time is counted as waiting.

    Args:
        operation: Its name, for the watchdog.
        inner: torch's implementation.
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
    """Shard the parameters of ``root`` over the ranks: those of each unit together, then the rest.

    Parameters become ``DTensor``, on ``device``. Those of a unit are gathered only while it computes.

    Collective: every rank, with modules of the same shapes. Blocks.

    Returns:
        Whether `lockstep.activity` counts the time that a rank waits for others in forward and backward.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # Otherwise `fully_shard` moves the units one by one. Tensors on the meta device stay there.
    if not keeps_objects(device) and not is_on_meta(root):
        move(root, device)
    mesh = DeviceMesh.from_group(group, device.type)
    divided = [*units, root]
    # Units first: the root then shards the remaining parameters.
    for unit in divided:
        fully_shard(unit, mesh=mesh)
    # On a GPU the collectives do not block the host, so timing them would measure nothing.
    all_gather, reduce_scatter = fully_shard_all_gather(), fully_shard_reduce_scatter()
    if device.type != "cpu" or None in (all_gather, reduce_scatter):
        return False
    for unit in divided:
        unit.set_custom_all_gather(_TimedCollective("all_gather of fully_shard", all_gather()))  # type: ignore[operator]
        unit.set_custom_reduce_scatter(_TimedCollective("reduce_scatter of fully_shard", reduce_scatter()))  # type: ignore[operator]
    return True


def is_sharded(tensor: object) -> bool:
    """Return whether a rank holds only a part of ``tensor``."""
    # The import takes a second. While the module is not imported, there are no such tensors.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` before ``fully_shard`` replaced it by a derived class."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory; any other tensor unchanged."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def local_chunk(tensor: Any) -> tuple[tuple[int, ...], Tensor]:
    """Return the offsets of this rank's part of a sharded tensor, and the part, which shares its memory."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tensor.to_local()


@torch.no_grad()
def copy_part(tensor: Any, source: Tensor) -> None:
    """Copy ``source``, which has the whole shape, to a tensor or to this rank's part of a sharded tensor."""
    if is_sharded(tensor):
        offsets, tensor = local_chunk(tensor)
        source = source[tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))]
    tensor.copy_(source)


def whole(tensor: Any) -> Any:
    """Return a sharded tensor as a whole; anything else unchanged. Collective: every rank. Blocks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
