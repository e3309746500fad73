"""`fit`: train a task, with everything around the steps."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lockstep.comm.world import World, init
from lockstep.data.loader import explaining_worker_failures
from lockstep.train.evaluate import FitResult
from lockstep.train.profiling import profiled
from lockstep.train.run import Run
from lockstep.train.settings import FitSettings
from lockstep.train.stopping import StopSignals
from lockstep.train.task import Task

if TYPE_CHECKING:
    from lockstep.train.checkpoint import Checkpoints

# Functions that take settings as keywords, without listing them again.

P = ParamSpec("P")
R = TypeVar("R")


def takes_settings(
    make: Callable[P, FitSettings],
) -> Callable[[Callable[[Task, FitSettings], R]], Callable[Concatenate[Task, P], R]]:
    """Have a function of task and settings take the settings as keywords, with the types and defaults of ``make``."""

    def decorate(function: Callable[[Task, FitSettings], R]) -> Callable[Concatenate[Task, P], R]:
        @functools.wraps(function)
        def called(task: Task, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return function(task, make(*args, **kwargs))

        task, _ = inspect.signature(function).parameters.values()
        keywords = inspect.signature(make).parameters.values()
        signature = inspect.signature(function).replace(parameters=[task, *keywords])
        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate


# `fit`: train a task, with everything around the steps.


def fit_with(task: Task, settings: FitSettings) -> FitResult:
    """Train ``task`` as `fit` does, with its keywords as one object."""
    with (
        init() as world,
        explaining_worker_failures(world.rank),
        StopSignals(enabled=settings.checkpoint is not None, rank=world.rank) as signals,
        _checkpoints(settings, world) as checkpoints,
        contextlib.closing(Run(task, settings, world, signals, checkpoints)) as run,
    ):
        run.catch_up()
        is_to_stop = False
        with profiled(settings, world, run) as step:
            while run.has_steps_left:
                step()
                if is_to_stop := run.is_to_stop():
                    break
                if run.is_due(settings.eval_every):
                    run.evaluate()
                if run.is_due(settings.checkpoint_every) or run.has_new_best:
                    run.save()
        return run.stop() if is_to_stop else run.finish()


def _checkpoints(settings: FitSettings, world: World) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """Return the checkpoints that ``settings`` ask for, if they do. Collective: every rank."""
    if settings.checkpoint is None:
        return contextlib.nullcontext()
    from lockstep.train.checkpoint import Checkpoints  # not at the top: torch.distributed.checkpoint takes a second

    return Checkpoints(
        Path(settings.checkpoint),
        world,
        fresh=settings.resume is False,
        keep=settings.keep,
        keep_best=settings.keep_best,
        blocking=settings.checkpoint_blocking,
    )


@takes_settings(FitSettings)
def fit(task: Task, settings: FitSettings) -> FitResult:
    """Train ``task`` and return what came of it.

    The keywords are those of `lockstep.train.settings.FitSettings`; ``lockstep train --help`` explains each.
    In a process that ``lockstep run``, ``lockstep.launch`` or torchrun started, it trains with the other ranks.
    Otherwise it trains in this process alone, with strategy ``dp`` on several devices.

    With a folder for checkpoints, SIGTERM, SIGUSR1 and Ctrl-C stop it after the step and save; the result says so.

    Collective for ``ddp`` and ``torch-ddp``: every rank. Blocks until the training is done, or stopped.

    Raises:
        ConfigurationError: Task, settings and devices do not go together; says what to change.
        DataError: A sample cannot be read, or too many cannot; names it, and its file where the data set does.
        NonFiniteGradient: A gradient is NaN or infinite, or too many are; names rank, parameter, step and samples.
        ReplicasDiffer: The ranks do not hold the same bits any more; names the tensor, the ranks, and since when.
        LoaderDied: A process that loads samples is gone; says what probably happened.
        CheckpointError: A checkpoint cannot be read or written; names the file.
    """
    return fit_with(task, settings)
