"""What this rank hands over to torch's ``fully_shard``, looked at before it becomes a sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Look = Callable[[int, Tensor], None]
"""Called with the number of a unit and this rank's flat gradients of it, on the stream that will reduce them."""


def look_before_reducing(root: nn.Module, look: Look) -> bool:
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
        module.set_custom_reduce_scatter(WatchedReduceScatter(DefaultReduceScatter(), number, look))  # type: ignore[arg-type]
    return True


class WatchedReduceScatter:
    """A reduce-scatter of ``fully_shard`` whose input is looked at.

    Args:
        inner: What carries it out.
        number: Of the unit.
        look: What looks.
    """

    def __init__(self, inner: Any, number: int, look: Look) -> None:
        self._inner, self._number, self._look = inner, number, look

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for its input or result."""
        return self._inner.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Collective: every rank."""
        self._look(self._number, input_tensor)
        return self._inner(output_tensor, input_tensor, group, op, async_op)
