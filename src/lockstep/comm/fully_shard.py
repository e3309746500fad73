"""torch's ``fully_shard`` (FSDP2): the operations that ``fit`` needs of it, and its collectives timed and observed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import activity
from lockstep.comm.collectives import Group

# How long a rank is in the collectives of torch's ``fully_shard`` on CPUs, which block it in forward and backward.


def count_waits(modules: Iterable[nn.Module]) -> bool:
    """Let the collectives of ``modules``, which ``fully_shard`` has divided, count as waiting; return whether they do.

    They are those that torch has by default. On a GPU they do not block the host, so nothing would be known by it.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    except ImportError:  # another version of torch
        return False
    for module in modules:
        module.set_custom_all_gather(TimedAllGather(DefaultAllGather()))  # type: ignore[operator]
        module.set_custom_reduce_scatter(TimedReduceScatter(DefaultReduceScatter()))  # type: ignore[operator]
    return True


class TimedAllGather:
    """An all-gather of ``fully_shard`` that takes note of its time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for its result."""
        return self._inner.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Collective: every rank."""
        with _counted():
            return self._inner(output_tensor, input_tensor, group, async_op)


class TimedReduceScatter:
    """A reduce-scatter of ``fully_shard`` that takes note of its time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for its result."""
        return self._inner.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Collective: every rank."""
        with _counted():
            return self._inner(output_tensor, input_tensor, group, op, async_op)


@contextmanager
def _counted() -> Iterator[None]:
    started_s = time.perf_counter()
    try:
        yield
    finally:
        activity.now.waited_s += time.perf_counter() - started_s


# What this rank hands over to torch's ``fully_shard``, looked at before it becomes a sum over the ranks.

GradientObserver = Callable[[int, Tensor], None]
"""Called with the number of a unit and this rank's flat gradients of it, on the stream that will reduce them."""


def observe_before_reducing(root: nn.Module, look: GradientObserver) -> bool:
    """Call ``look`` ahead of each reduction of gradients of ``root``, which ``fully_shard`` has divided.

    The reductions are those that torch has by default.

    Returns:
        Whether it will be called: not with another version of torch.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    except ImportError:
        return False
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for number, module in enumerate(units):
        module.set_custom_reduce_scatter(ObservedReduceScatter(DefaultReduceScatter(), number, look))  # type: ignore[arg-type]
    return True


class ObservedReduceScatter:
    """A reduce-scatter of ``fully_shard`` whose input is looked at.

    Args:
        inner: What carries it out.
        number: Of the unit.
        look: What looks.
    """

    def __init__(self, inner: Any, number: int, look: GradientObserver) -> None:
        self._inner, self._number, self._look = inner, number, look

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for its input or result."""
        return self._inner.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Collective: every rank."""
        self._look(self._number, input_tensor)
        return self._inner(output_tensor, input_tensor, group, op, async_op)


# torch's ``fully_shard`` (FSDP2): the few operations that ``fit`` needs of it.


def fully_shard_units(root: nn.Module, units: Iterable[nn.Module], *, group: Group, device: torch.device) -> bool:
    """Divide the parameters of ``root`` among the ranks: those of each unit together, then the rest.

    Parameters become ``DTensor``, on ``device``. Those of a unit are whole on every rank only while it computes.

    Collective: every rank, with modules of the same shapes. Blocks.

    Returns:
        Whether what a rank waits for the others in forward and backward is counted, in `lockstep.activity`.
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


def is_sharded(tensor: object) -> bool:
    """Tell whether a rank holds only a part of ``tensor``."""
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


def whole(tensor: Any) -> Any:
    """Return all of a divided tensor; anything else as it is. Collective: every rank. Blocks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
