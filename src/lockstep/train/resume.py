"""Whether a checkpoint fits a run, and taking over what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.data.order import GlobalOrder
from lockstep.data.stream_reader import StreamOrder
from lockstep.errors import ConfigurationError
from lockstep.train.arithmetic import Arithmetic
from lockstep.train.settings import Settings
from lockstep.train.whole_state import load_whole


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
        load_whole(model, optimizer, state)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The checkpoint does not fit the task's model or optimizer: {error}\n"
            "Resume with the task that the run was started with, or start anew (resume=False)."
        ) from error
