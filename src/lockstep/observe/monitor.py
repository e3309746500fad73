"""`monitor`: one line that has a training script recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.errors import ConfigurationError
from lockstep.observe import attach
from lockstep.observe.observation import Observation
from lockstep.observe.optimizers import updates
from lockstep.observe.session import find_place
from lockstep.observe.watch import Watch


def monitor(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: DataLoader[Any] | Sequence[DataLoader[Any]] | None = None,
    *,
    run_dir: str | Path | None = None,
    first_step: int = 0,
) -> Watch:
    """Record a training loop of one's own, as ``fit`` records its runs, for ``lockstep report``.

    Each rank writes how long its steps take and what for, their learning rate, memory and load; with
    `Watch.loss` and `Watch.grad_norm` these, too. A step is what lies between two ``optimizer.step()``, with any number
    of micro-batches; forwards without gradients, or in evaluation mode, are an evaluation. Works with
    ``DistributedDataParallel`` and ``DataParallel``, ours and torch's, and with a bare model. Changes nothing that is
    computed, and waits for no device.

    Collective where there is a default process group: every rank, behind making it. Blocks until all have come.

    Args:
        model: What is called for a forward: the wrapper, if there is one, on its device. Several for a loop that
            trains several.
        optimizer: That ends a step; of several, the first that steps. If left out, all that update ``model``.
        loader: Whose waiting is seen; every DataLoader of the process if left out. For a loop over something else, see
            `Watch.batches`.
        run_dir: The folder for the record; made if it is not there. By default ``runs/`` and the name of the script. An
            earlier record in it is overwritten, unless ``first_step`` is given.
        first_step: Steps done before, in a script that goes on from a checkpoint.

    Returns:
        What is told losses, and ends the record. It ends by itself with the process.

    Raises:
        ConfigurationError: What is given does not go together, or a rank cannot write into the folder; then on all.
    """
    models, optimizers = _models(model), _optimizers(optimizer)
    loaders = _loaders(loader)
    if not any(parameter.requires_grad for each in models for parameter in each.parameters()):
        raise ConfigurationError(
            f"{_names(models)} has no parameter that is trained.\nGive the model that is called in training."
        )
    for each in optimizers or ():
        if not updates(each, models):
            raise ConfigurationError(
                f"The optimizer {type(each).__name__} updates no parameter of {_names(models)}.\n"
                "Give the model and the optimizer of the same training; make the optimizer behind wrapping the model."
            )
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise ConfigurationError(f"first_step is {first_step!r}.\nGive the number of steps done before, 0 or more.")
    attach.give_way()
    folder = Path(run_dir) if run_dir is not None else attach.folder() or _default_folder()
    if _last and not _last[-1].is_closed:
        raise ConfigurationError(
            f"This process is monitored already, into {_last[-1].run_dir}.\n"
            "Call close() on what monitor() has returned, or give all models and optimizers at once."
        )
    place = find_place()
    _last[:] = [Observation(models, optimizers, loaders, run_dir=folder, place=place, first_step=first_step)]
    return Watch(_last[-1])


_last: list[Observation] = []


def _models(model: Any) -> list[nn.Module]:
    return _listed(model, nn.Module, "model", "no nn.Module.\nGive the model that is called in training, or a list.")


def _optimizers(optimizer: Any) -> list[Optimizer] | None:
    if optimizer is None:
        return None
    wrong = "no torch.optim.Optimizer.\nGive that which steps, or a list, or leave it out."
    optimizers: list[Optimizer] = _listed(optimizer, Optimizer, "optimizer", wrong)
    within = [getattr(each, "optimizer", None) for each in optimizers]  # some libraries wrap them
    return [inner if isinstance(inner, Optimizer) else outer for outer, inner in zip(optimizers, within, strict=True)]


def _loaders(loader: Any) -> list[DataLoader[Any]] | None:
    if loader is None:
        return None
    wrong = (
        "no DataLoader, so that waiting for its batches cannot be seen.\n"
        "Leave it out, and write: for batch in watch.batches(loader), where watch is what monitor() returns."
    )
    return _listed(loader, DataLoader, "loader", wrong)


def _listed(value: Any, kind: type, name: str, otherwise: str) -> list[Any]:
    """Return what was given as a list, of which each is of a kind."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    wrong = [each for each in values if not isinstance(each, kind)]
    if not values:
        raise ConfigurationError(f"{name} is an empty list.\nGive at least one.")
    if wrong:
        raise ConfigurationError(f"{name} is of type {type(wrong[0]).__name__}, which is {otherwise}")
    return values


def _names(models: Sequence[nn.Module]) -> str:
    return " and ".join(type(each).__name__ for each in models)


def _default_folder() -> Path:
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return Path("runs") / (name or "script")
