"""What every rank should hold the same bits of: parameters, buffers and optimizer state, by name.

[Note: what may differ]
Left out is what each rank rightly has on its own:

- buffers that are overwritten by rank 0's before each forward (``broadcast_buffers=True``): between two forwards they
  hold what this rank's batch left there, and a difference is gone before anything reads it;
- otherwise the running statistics of norm layers that see this rank's samples only;
- what is divided among the ranks: DTensor, and the state of a ``ZeroRedundancyOptimizer``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lockstep.comm.fully_shard import is_divided

Buffers = Literal["healed", "own", "same"]
"""Whether rank 0's overwrite the others, norm layers keep each rank's own, or all are the same on all ranks."""


@dataclass
class Replica:
    """What a rank holds, in the order in which a difference is looked for.

    Args:
        tensors: By name.
        numbers: What optimizers keep as plain numbers, by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def all(self) -> Iterator[tuple[str, Tensor]]:
        """Return everything as tensors, by name."""
        yield from self.tensors.items()
        for name, number in self.numbers.items():
            yield name, torch.tensor(number, dtype=torch.float64)


def replica_of(
    module: nn.Module, optimizer: Optimizer | None = None, *, buffers: Buffers, ignore: Collection[str] = ()
) -> Replica:
    """Return what this rank holds that all ranks should: see [Note: what may differ].

    Args:
        module: Its parameters come first, each layer's followed by its buffers.
        optimizer: Of these parameters.
        buffers: How they are kept alike, if at all.
        ignore: Names of parameters and buffers to leave out.
    """
    replica = Replica()
    names: dict[Tensor, str] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            full = f"{path}.{name}" if path else name
            if parameter is None or parameter in names or full in ignore:
                continue
            names[parameter] = full
            replica.tensors[f"parameter {full}"] = parameter
        for name, buffer in layer._buffers.items():
            full = f"{path}.{name}" if path else name
            if buffer is None or buffers == "healed" or full in ignore or (buffers == "own" and _sees_own(layer)):
                continue
            replica.tensors[f"buffer {full}"] = buffer
    if optimizer is not None and not _divides_state(optimizer):
        _add_state(replica, optimizer, names)
    replica.tensors = {name: each for name, each in replica.tensors.items() if _is_comparable(each)}
    return replica


def _add_state(replica: Replica, optimizer: Optimizer, names: dict[Tensor, str]) -> None:
    for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        owner = f"parameter {names[parameter]}" if parameter in names else f"the optimizer's parameter {index}"
        for name, value in optimizer.state.get(parameter, {}).items():
            _add(replica, f"{name} of {owner}", value)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            _add(replica, f"{name} of parameter group {number}", value)


def _add(replica: Replica, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        replica.tensors[name] = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        replica.numbers[name] = float(value)


def _sees_own(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and not isinstance(layer, nn.SyncBatchNorm)


def _divides_state(optimizer: Optimizer) -> bool:
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def _is_comparable(tensor: Tensor) -> bool:
    return not is_divided(tensor) and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta
