"""Turn off, for a while, other things that a run may hang on: batch statistics, writes to buffers, the outside."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class NoBatchStatistics(TorchFunctionMode):
    """Within, batch norm uses its running statistics, also where it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _by_running(*args, **kwargs)
        if func is torch.batch_norm:
            x, weight, bias, mean, var, _, momentum, eps, _ = args
            return _by_running(x, mean, var, weight, bias, True, momentum, eps)
        return func(*args, **kwargs)


def _by_running(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what batch norm gives in evaluation; with a mean of 0 and a variance of 1 where it keeps none."""
    mean = x.new_zeros(x.shape[1]) if running_mean is None else running_mean
    var = x.new_ones(x.shape[1]) if running_var is None else running_var
    return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer is batch norm of some kind; instance norm keeps to each sample."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) or "BatchNorm" in type(module).__name__


def is_synchronised(module: nn.Module) -> bool:
    """Return whether a layer talks to other ranks in forward, so that one process cannot stand for them."""
    return is_batch_norm(module) and "Sync" in type(module).__name__


class NoWrites(TorchDispatchMode):
    """While entered and within `during`, undoes what is written into a model's parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def during(self, model: nn.Module) -> Iterator[None]:
        """Undo writes within, and buffers that were replaced."""
        tensors = [*model.parameters(), *model.buffers()]
        owners = [(module, dict(module._buffers)) for module in model.modules()]
        with torch.no_grad():
            self._kept = {_address(t): (t.detach(), t.detach().clone()) for t in tensors if t.numel()}
        try:
            yield
        finally:
            self._kept = {}
            for module, buffers in owners:
                module._buffers.update(buffers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._kept and func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, Tensor) and _address(value) in self._kept:
                    tensor, before = self._kept[_address(value)]
                    tensor.copy_(before)
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def outside_stands_still() -> Iterator[None]:
    """Within, the clock stands still and the system's random numbers are always the same.

    The monotonic clock goes on: others wait by it.
    """

    def system_bytes(size: int) -> bytes:
        return b"\x2a" * size

    plain = random.Random

    class Seeded(plain):  # type: ignore[misc, valid-type]
        def __init__(self, x: Any = 0) -> None:
            super().__init__(0 if x is None else x)

    with (
        patch.object(time, "time", lambda: 1e9),
        patch.object(time, "time_ns", lambda: 10**18),
        patch.object(time, "perf_counter", lambda: 1e3),
        patch.object(time, "perf_counter_ns", lambda: 10**12),
        patch.object(os, "urandom", system_bytes),
        patch.object(random, "_urandom", system_bytes),
        patch.object(random, "Random", Seeded),
        patch.object(torch, "seed", lambda: int(torch.manual_seed(42).initial_seed())),
    ):
        yield
