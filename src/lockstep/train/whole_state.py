"""The state of model and optimizer, whole and in torch's format, whoever holds which part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.fully_shard import divided_like, is_divided, whole
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train.checkpoints.names import names_as_in, plain_names


def take_whole(model: nn.Module, optimizer: Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
    """Return the state of model and optimizer, by name.

    On ranks other than 0 that of the optimizer may be None, unless it is asked for ``everywhere``.

    Collective where something is divided among ranks: every rank. Blocks then.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()
        optimizer.consolidate_state_dict(to=None if everywhere else 0)
        state = optimizer.state_dict() if everywhere or optimizer.rank == 0 else None
        return {"model": plain_names(model.state_dict()), "optimizer": state}
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: whole(value) for name, value in entries.items()} for index, entries in state["state"].items()
    }
    return {"model": plain_names(take_whole_model(model)), "optimizer": state}


def take_whole_model(model: nn.Module) -> dict[str, Any]:
    """Return the state of ``model``. Collective where its parameters are divided: every rank. Blocks then."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def load_whole(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give model and optimizer what `take_whole` returned, of which every rank has all.

    Raises:
        RuntimeError, ValueError: It is of another model or optimizer.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()
    mine = model.state_dict()
    theirs = names_as_in(mine, state["model"])
    model.load_state_dict({name: _like(mine.get(name), value) for name, value in theirs.items()})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(is_divided(parameter) for parameter in parameters):
        entries = {
            index: {
                name: _like(parameters[index], value)
                if getattr(value, "shape", None) == parameters[index].shape
                else value
                for name, value in each.items()
            }
            for index, each in state["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**state["optimizer"], "state": entries})
    else:
        optimizer.load_state_dict(state["optimizer"])


def _like(divided: object, value: Any) -> Any:
    if not is_divided(divided) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return divided_like(value, divided)
