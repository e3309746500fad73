"""The state of model and optimizer, whole and in torch's format, whoever holds which part of it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer


def take_whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of model and optimizer, by name; on ranks other than 0 that of the optimizer may be None.

    Collective where the optimizer is divided among ranks: every rank. Blocks then.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        whole = optimizer.state_dict() if optimizer.rank == 0 else None
        return {"model": model.state_dict(), "optimizer": whole}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
