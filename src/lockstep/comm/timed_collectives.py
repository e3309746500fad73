"""How long a rank is in the collectives of torch's ``fully_shard`` on CPUs, which block it in forward and backward."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import progress


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
        progress.now.waited_s += time.perf_counter() - started_s
