"""torch's ``fully_shard`` (FSDP2): the few operations that ``fit`` needs of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Group
from lockstep.comm.timed_collectives import count_waits


def fully_shard_units(root: nn.Module, units: Iterable[nn.Module], *, group: Group, device: torch.device) -> bool:
    """Divide the parameters of ``root`` among the ranks: those of each unit together, then the rest.

    Parameters become ``DTensor``, on ``device``. Those of a unit are whole on every rank only while it computes.

    Collective: every rank, with modules of the same shapes. Blocks.

    Returns:
        Whether what a rank waits for the others in forward and backward is counted, in `lockstep.progress`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    divided = [*units, root]
    for unit in divided:
        fully_shard(unit, mesh=mesh)
    return device.type == "cpu" and count_waits(divided)


def sum_gradients(root: nn.Module, *, over_ranks: bool) -> None:
    """Say whether the next backward reduces gradients over the ranks, or adds to what this rank has."""
    root.set_requires_gradient_sync(over_ranks)  # type: ignore[operator]


def is_divided(tensor: object) -> bool:
    """Tell whether a rank holds only a part of ``tensor``."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, also of one for which ``fully_shard`` has made a class that inherits from it."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a divided tensor, which shares its memory; others as they are."""
    part: Tensor = tensor.to_local() if is_divided(tensor) else tensor
    return part


def whole(tensor: Any) -> Any:
    """Return all of a divided tensor; anything else as it is. Collective: every rank. Blocks."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def divided_like(value: Tensor, divided: Any) -> Tensor:
    """Return ``value``, which every rank has whole, divided as ``divided`` is. No communication."""
    from torch.distributed.tensor import distribute_tensor

    on_device = value.to(divided.device)
    return distribute_tensor(on_device, divided.device_mesh, divided.placements, src_data_rank=None)
