"""torch's ``fully_shard`` (FSDP2): the operations that ``fit`` uses."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.accelerator import is_on_meta, keeps_objects, move
from lockstep.comm.collectives import Group


def fully_shard_units(root: nn.Module, units: Iterable[nn.Module], *, group: Group, device: torch.device) -> None:
    """Shard the parameters of ``root`` over the ranks: those of each unit together, then the rest.

    Parameters become ``DTensor``, on ``device``. Parameters of a unit are gathered only while it computes.

    Collective: every rank, with modules of the same shapes. Blocks.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # Otherwise `fully_shard` moves the units one by one. Tensors on the meta device stay there.
    if not keeps_objects(device) and not is_on_meta(root):
        move(root, device)
    mesh = DeviceMesh.from_group(group, device.type)
    # Units first: the root then shards the remaining parameters.
    for unit in [*units, root]:
        fully_shard(unit, mesh=mesh)


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
