"""`monitor` records a training script with one line; ``lockstep run --monitor`` records it without a change."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep import activity
from lockstep.errors import ConfigurationError
from lockstep.observe.steps import num_samples, updates
from lockstep.observe.watch import Watch, find_place, trained_parameters
from lockstep.telemetry.instrument import Instrument, compiled_call, in_backward
from lockstep.telemetry.provenance import gather
from lockstep.telemetry.record import num_restarts
from lockstep.telemetry.recorder import Place
from lockstep.telemetry.sinks import parse_targets
from lockstep.train.settings import ViewName

# --- ``lockstep run --monitor``: an unchanged script ------------------------------------------------------------------
#
# [Note: finding the model]
# During the first optimizer steps, every call of a module is checked. The outermost modules that train are the models;
# they get hooks, and calls are no longer checked. Global hooks of torch would do the same, but compiled models warn of
# them. Functions compiled while calls are checked may be compiled again later, so the search ends with the first
# compiled model.

# After so many optimizer steps, all models have been called.
_NUM_STEPS = 3
# The search ends after so many calls, to not slow down a program that never trains.
_MOST_CALLS = 20_000

_attached: Attached | None = None


def attach(folder: str, view: ViewName = "none", log_to: str = "") -> None:
    """Record this process into ``folder`` as soon as it trains; called before the script starts."""
    global _attached
    _attached = Attached(Path(folder), view, parse_targets(log_to or ()))


class Attached:
    """Finds the training loop of this process, and records it.

    Args:
        folder: The folder for the record.
        view, log_to: As for `monitor`.
    """

    def __init__(self, folder: Path, view: ViewName, log_to: Sequence[str]) -> None:
        self.folder, self._view, self._log_to = folder, view, log_to
        self._rank, self._num_ranks = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        # Now, as the script may change the working directory, or initialize CUDA, after which git should not be forked.
        self._provenance = gather(Path(sys.argv[0])) if self._rank == 0 else None
        self._models: list[nn.Module] = []
        self._watch: Watch | None = None
        self._num_calls = 0
        self._is_searching = True
        self._instrument = Instrument(self._fail)
        self._instrument.before(nn.Module, "__call__", self._on_call)

    def stop(self) -> None:
        """Stop recording, as the script calls `monitor` itself."""
        self._stop_searching()
        if self._watch is not None:
            self._watch.close()

    def _stop_searching(self) -> None:
        self._is_searching = False
        self._instrument.close()

    def _on_call(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Check a call of any module; see [Note: finding the model]."""
        if not self._is_searching or not torch.is_grad_enabled() or not module.training:
            return
        self._num_calls += 1
        watch = self._watch
        if self._num_calls > _MOST_CALLS or (watch is not None and watch.num_steps >= _NUM_STEPS):
            self._stop_searching()
            return
        if threading.current_thread() is not threading.main_thread() or in_backward() or module in self._models:
            return
        if (watch is not None and watch.steps.in_forward) or not trained_parameters([module]):
            return
        if activity.now.step is not None:
            raise ConfigurationError("the script trains with fit(): use its setting run_dir")
        if watch is None:
            self._models.append(module)
            # No group: the ranks may be at different places in the script, so collectives are not possible.
            name = f"{os.environ.get('TORCHELASTIC_RUN_ID') or 'run'}-{num_restarts()}"
            self._watch = watch = Watch(
                self._models,
                run_dir=self.folder,
                place=Place(self._rank, self._num_ranks, name=name),
                provenance=self._provenance,
                view=self._view,
                log_to=self._log_to,
            )
        else:
            watch.add_model(module)
        if watch.steps.current is None:  # the batch arrived before the loaders were observed
            watch.steps.unclaimed += num_samples(args) or num_samples(kwargs)
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        compiled = () if dynamo is None else dynamo.OptimizedModule
        if any(compiled_call(part) is not None or isinstance(part, compiled) for part in module.modules()):
            self._stop_searching()

    def _fail(self, error: Exception) -> None:
        self._stop_searching()
        if self._rank == 0:
            reason = str(error).partition("\n")[0] or type(error).__name__
            sys.stderr.write(f"lockstep: nothing is recorded: {reason}\n")


# --- `monitor`: one line in a script ----------------------------------------------------------------------------------


def monitor(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: DataLoader[Any] | Sequence[DataLoader[Any]] | None = None,
    *,
    run_dir: str | Path | None = None,
    first_step: int = 0,
    view: ViewName = "none",
    log_to: str | Sequence[str] | None = None,
) -> Watch:
    """Record the training loop of a script for ``lockstep report``, and show it while it runs.

    Each rank records the time of its steps and their parts, the learning rate, memory and load, and the values given
    to `Watch.loss` and `Watch.grad_norm`. A step ends with ``optimizer.step()`` and may have any number of
    micro-batches. Forwards without gradients, or in evaluation mode, are an evaluation. Works with
    ``DistributedDataParallel`` and ``DataParallel`` of Lockstep and torch, and with a bare model. Does not change the
    computation, and does not synchronize devices.

    Collective if there is a default process group: call it on every rank, after creating the group. Blocks until all
    ranks have called it.

    Args:
        model: The module that is called in a forward, on its device: the wrapper, if there is one. A list if the loop
            trains several models.
        optimizer: The optimizer whose ``step()`` ends a step; of several, the first one. By default, all optimizers
            that update ``model``.
        loader: The DataLoader (or several) whose waiting is recorded; by default, all of the process. For other
            iterables, see `Watch.batches`.
        run_dir: The folder for the record, created if it does not exist; by default ``runs/`` and the name of the
            script. An earlier record in it is moved to ``earlier-...`` within it, or continued with ``first_step``.
        first_step: Number of steps done before, in a script that resumes from a checkpoint.
        view: The display of progress on rank zero, as for `fit`; the loss in it is the one given to `Watch.loss`.
        log_to: Sinks for metrics, as for `fit`, such as ``tensorboard:runs/mine``.

    Returns:
        The record, which also takes losses. It ends with the process.

    Raises:
        ConfigurationError: The arguments do not fit together; or, on all ranks, a rank cannot write into the folder, or
            a sink cannot be opened.
    """
    models: list[nn.Module] = _listed(
        model, nn.Module, "model", "not an nn.Module.\nGive the model that is called in training, or a list."
    )
    optimizers: list[Optimizer] = _listed(
        optimizer, Optimizer, "optimizer", "not a torch.optim.Optimizer.\nGive the optimizer, or a list, or omit it."
    )
    for number, each in enumerate(optimizers):  # some libraries wrap them
        inner = getattr(each, "optimizer", None)
        optimizers[number] = inner if isinstance(inner, Optimizer) else each
    loaders: list[DataLoader[Any]] = _listed(
        loader,
        DataLoader,
        "loader",
        "not a DataLoader, so waiting for its batches cannot be measured.\n"
        "Omit it, and write: for batch in watch.batches(loader), where watch is the result of monitor().",
    )
    names = " and ".join(type(each).__name__ for each in models)
    if not trained_parameters(models):
        raise ConfigurationError(
            f"{names} has no parameter that requires a gradient.\nGive the model that is called in training."
        )
    for each in optimizers:
        if not updates(each, models):
            raise ConfigurationError(
                f"The optimizer {type(each).__name__} updates no parameter of {names}.\n"
                "Give the optimizer of this model; create it after wrapping the model."
            )
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise ConfigurationError(f"first_step is {first_step!r}.\nGive the number of steps done before, at least 0.")
    folder = Path("runs") / (Path(sys.argv[0]).stem or "script")
    if _attached is not None:
        _attached.stop()
        folder = _attached.folder
    if run_dir is not None:
        if "://" in str(run_dir):
            raise ConfigurationError(f"run_dir={run_dir} is in an object store.\nName a folder on this machine.")
        folder = Path(run_dir)
    global _last
    if _last is not None and not _last.is_closed:
        raise ConfigurationError(
            f"This process is already being recorded, into {_last.run_dir}.\n"
            "Call close() on the result of monitor(), or give all models and optimizers in one call."
        )
    if view not in get_args(ViewName):
        raise ConfigurationError(f"view={view!r} is not allowed.\nChoose from: {', '.join(get_args(ViewName))}.")
    targets, place = parse_targets(log_to or ()), find_place()
    ours = models, optimizers or None, loaders or None
    _last = Watch(*ours, run_dir=folder, place=place, first_step=first_step, view=view, log_to=targets)
    return _last


_last: Watch | None = None


def _listed(value: Any, kind: type, name: str, otherwise: str) -> list[Any]:
    """Return an argument as a list whose items have the type ``kind``; empty if it was omitted."""
    if value is None and kind is not nn.Module:
        return []
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    wrong = [each for each in values if not isinstance(each, kind)]
    if not values:
        raise ConfigurationError(f"{name} is an empty list.\nGive at least one.")
    if wrong:
        raise ConfigurationError(f"{name} is of type {type(wrong[0]).__name__}, which is {otherwise}")
    return values
