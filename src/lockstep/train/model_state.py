"""The state of model and optimizer as a checkpoint has it, and back into any strategy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.fully_shard import divided_like, is_divided, whole
from lockstep.data.order import GlobalOrder
from lockstep.data.stream import StreamOrder
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.dp.wrapper import DataParallel
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train.reproducible import Arithmetic
from lockstep.train.settings import Settings

# Models without what is wrapped around them, and names of their state without what wrappers put into them.

_WRAPPERS = (DataParallel, DistributedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)
_COMPILED = "_orig_mod"
"""Where ``torch.compile`` keeps the module that it compiles."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model in data-parallel wrappers and in what ``torch.compile`` returns."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by whoever compiles
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif dynamo is not None and isinstance(model, dynamo.OptimizedModule):
            model = model.get_submodule(_COMPILED)
        else:
            return model


def plain_name(name: str) -> str:
    """Return a name of a model's state as if no part of the model were compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state under the names that it has where nothing is compiled."""
    return {plain_name(name): value for name, value in state.items()}


def names_as_in(model_state: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` under the names that ``model_state`` has, whatever is compiled in either of them."""
    own = {plain_name(name): name for name in model_state}
    return {own.get(plain_name(name), name): value for name, value in state.items()}


# The state of model and optimizer, whole and in torch's format, whoever holds which part of it.


def full_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of model and optimizer, by name.

    On ranks other than 0 that of the optimizer may be None.

    Collective where something is divided among ranks: every rank. Blocks then.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict() if optimizer.rank == 0 else None
        return {"model": plain_names(model.state_dict()), "optimizer": state}
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: whole(value) for name, value in entries.items()} for index, entries in state["state"].items()
    }
    return {"model": plain_names(full_model_state_dict(model)), "optimizer": state}


def full_model_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of ``model``. Collective where its parameters are divided: every rank. Blocks then."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def load_full_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give model and optimizer what `full_state_dict` returned, of which every rank has all.

    Raises:
        RuntimeError, ValueError: It is of another model or optimizer.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()
    mine = model.state_dict()
    theirs = names_as_in(mine, state["model"])
    model.load_state_dict({name: _sharded_like(mine.get(name), value) for name, value in theirs.items()})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(is_divided(parameter) for parameter in parameters):
        entries = {
            index: {
                name: _sharded_like(parameters[index], value)
                if getattr(value, "shape", None) == parameters[index].shape
                else value
                for name, value in each.items()
            }
            for index, each in state["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**state["optimizer"], "state": entries})
    else:
        optimizer.load_state_dict(state["optimizer"])


def _sharded_like(divided: object, value: Any) -> Any:
    if not is_divided(divided) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return divided_like(value, divided)


# Whether a checkpoint fits a run, and taking over what it holds.


def identity_of(order: GlobalOrder | StreamOrder, settings: Settings, arithmetic: Arithmetic) -> dict[str, Any]:
    """Return what a resumed run must have in common with the one it goes on with."""
    identity = {"samples": order.num_samples, "global batch": order.batch_size, "seed": order.seed}
    if settings.reproducible is None:
        return identity
    return identity | {"reproducible": settings.reproducible, "threads": arithmetic.threads}


def check_identity(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that a run and that of a checkpoint have in common what they must.

    Args:
        mine: What that is, by name, for this run.
        theirs: What the checkpoint has of it.

    Raises:
        ConfigurationError: Something differs; names it.
    """
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ConfigurationError(
                f"The checkpoint is of a run with {name} {theirs.get(name)}, this one has {value}.\n"
                "Resume with what the run was started with, or start anew (resume=False)."
            )


def load_into(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give model and optimizer the state that a checkpoint holds.

    Raises:
        ConfigurationError: It is of another model or optimizer.
    """
    try:
        load_full_state_dict(model, optimizer, state)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The checkpoint does not fit the task's model or optimizer: {error}\n"
            "Resume with the task that the run was started with, or start anew (resume=False)."
        ) from error
