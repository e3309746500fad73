"""`fit`: train a task, in this process or in ranks that are started for it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from lockstep.base.accelerator import is_on_meta
from lockstep.base.env import Launcher, RankEnv
from lockstep.base.setting import settings_of
from lockstep.checkpoints.best import Monitor
from lockstep.checkpoints.model_state import load_state_dict, plain_names
from lockstep.comm.collectives import is_initialized
from lockstep.comm.fully_shard import whole
from lockstep.comm.world import World, init
from lockstep.data.loader import explaining_worker_failures
from lockstep.data.stream import Stateful
from lockstep.errors import ConfigurationError
from lockstep.health.heartbeat import end_stopped_children
from lockstep.train.callbacks import RunView
from lockstep.train.plan import PER_PROCESS, check_batch, check_task, num_devices
from lockstep.train.profiling import profiled
from lockstep.train.result import FitResult
from lockstep.train.run import Run
from lockstep.train.settings import FitSettings, refusing_unknown
from lockstep.train.stopping import StopSignals, exit_code_of
from lockstep.train.task import Task, check_callbacks

if TYPE_CHECKING:
    from lockstep.checkpoints.checkpoint import Checkpoints
P = ParamSpec("P")


def fit_with(task: Task, settings: FitSettings) -> FitResult:
    """Train ``task`` as `fit` does, with its keywords as one object."""
    check_task(task, settings)
    # Registered once, and after multiprocessing's own handler, so that it runs before that.
    atexit.unregister(end_stopped_children)
    atexit.register(end_stopped_children)
    opened = World.opened  # by the script, which also closes it; a recovery changes it in place
    with (
        init() if opened is None else contextlib.nullcontext(opened) as world,
        explaining_worker_failures(world.rank),
        StopSignals(saves=settings.checkpoint is not None, rank=world.rank) as signals,
        _checkpoints(settings, world) as checkpoints,
        contextlib.closing(Run(task, settings, world, signals, checkpoints)) as run,
    ):
        with profiled(settings, world, range(run.num_steps_done + 1, run.state.num_steps + 1), run.pause_for) as around:
            while run.has_more:
                with run.attempt():
                    run.advance(around)
                run.join_exchange()
        while not run.state.stops and not run.is_complete:
            with run.attempt():
                run.complete()
        return run.stop() if run.state.stops else run.finish()


def _checkpoints(settings: FitSettings, world: World) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """Return the checkpoints that ``settings`` ask for, if they do. Collective: every rank."""
    if settings.checkpoint is None:
        return contextlib.nullcontext()
    # Importing torch.distributed.checkpoint takes a second, so only runs with checkpoints do it.
    from lockstep.checkpoints.checkpoint import Checkpoints
    from lockstep.checkpoints.object_store import place_of

    place, keep, blocking = place_of(settings.checkpoint), settings.keep or 2, settings.checkpoint_blocking
    fresh = settings.resume is False and not world.is_late
    best = Monitor.of(settings.keep_best) if settings.keep_best else None
    return Checkpoints(place, world, fresh, keep, best, blocking)


@refusing_unknown("setting")
@dataclass(frozen=True, kw_only=True)
class _Keywords(FitSettings):
    """The keywords of `fit`: the settings, and what no flag can give."""

    callbacks: Sequence[object] = ()

    @property
    def settings(self) -> FitSettings:
        return FitSettings(**{setting.name: getattr(self, setting.name) for setting in settings_of(FitSettings)})


class _Weights:
    """A callback that copies the weights at the end to the host memory of rank zero."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_end(self, run: RunView) -> None:
        for name, value in plain_names(run.model.state_dict()).items():
            tensor = whole(value)
            if run.is_rank_zero:
                self.state[name] = tensor.cpu() if isinstance(tensor, Tensor) else tensor


def _fit_in_rank(task: Task, settings: FitSettings) -> tuple[FitResult, dict[str, Any], list[Any]]:
    """Train as a rank; return the result, the weights, and the states of the callbacks."""
    weights, callbacks = _Weights(), task.callbacks
    result = fit_with(replace(task, callbacks=[*callbacks, weights]), settings)
    # Only rank zero has weights.
    states = [callback.state_dict() for callback in callbacks if weights.state and isinstance(callback, Stateful)]
    return result, weights.state, states


def _with_keywords_of(
    make: Callable[P, _Keywords], function: Callable[[Task, _Keywords], FitResult]
) -> Callable[Concatenate[Task, P], FitResult]:
    """Make a function of task and settings take the settings as keywords, with the types and defaults of ``make``."""

    @functools.wraps(function)
    def called(task: Task, /, *args: P.args, **kwargs: P.kwargs) -> FitResult:
        return function(task, make(*args, **kwargs))

    signature = inspect.signature(function)
    parameters = [signature.parameters["task"], *inspect.signature(make).parameters.values()]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


@functools.partial(_with_keywords_of, _Keywords)
def fit(task: Task, keywords: _Keywords) -> FitResult:
    """Train ``task`` and return the result, with the trained model.

    The keywords are those of `lockstep.train.settings.FitSettings`; ``lockstep train --help`` explains each. Further
    ``callbacks`` are called after those of the task; see `Task`.
    In a process that was started by ``lockstep run``, ``lockstep.launch`` or torchrun, it trains with the other ranks.
    Otherwise ``devices=N`` starts N ranks as ``lockstep.launch`` does, from a script (also without
    ``if __name__ == "__main__"``) or a notebook cell, and returns the result of rank zero. Without ``devices``, and
    with strategy ``dp``, it trains in this process. The task is sent to the ranks by cloudpickle; then `Task.model` is
    called here, too, and what it returns gets the trained weights. So do callbacks with a state, from rank zero. The
    trained weights are also in the files of ``checkpoint`` and ``export``, and `Task.after` is called with the model on
    rank zero.

    With a folder for checkpoints, SIGTERM, SIGUSR1 and Ctrl-C stop the run after the current step, with devices after
    the next one, and save; the result contains the reason.

    Collective for strategies with a process for each device: every rank. Blocks until the training ends.

    Raises:
        ConfigurationError: Task, settings and devices cannot be combined; says what to change.
        DataError: A sample cannot be read, or too many cannot; names it, and its file if the data set provides it.
        NonFiniteGradient: A gradient is NaN or infinite, or too many are; names rank, parameter, step and samples.
        ReplicasDiffer: The ranks do not hold the same bits; names the tensor, the ranks, and the last equal step.
        LoaderDied: A loader process has ended; gives the probable reason.
        CheckpointError: A checkpoint cannot be read or written; names the file.
        RankFailed: A rank that it started raised another error; the message contains its traceback.
    """
    is_rank = RankEnv.from_environ(os.environ).launcher is not Launcher.NONE or is_initialized()
    argument: object = task
    if not isinstance(argument, Task):
        advice = "Call it: fit(task(...))." if callable(argument) else "Pass the task."
        raise ConfigurationError(f"fit got a {type(argument).__name__}, not a lockstep.Task.\n{advice}")
    check_callbacks(keywords.callbacks)
    task, settings = replace(task, callbacks=[*task.callbacks, *keywords.callbacks]), keywords.settings
    num_ranks = 1 if settings.devices is None else num_devices(settings.devices)
    if is_rank or num_ranks == 1 or settings.strategy not in PER_PROCESS:
        return fit_with(task, settings)
    # Imported here, because the import is slow.
    from lockstep.launcher.api import launch, raising_task_errors

    check_task(task, settings)
    check_batch(task, settings, num_ranks)
    with raising_task_errors():
        result, weights, states = launch(_fit_in_rank, task, settings, devices=num_ranks)[0]
    with torch.random.fork_rng(devices=[]):
        model = task.model()
    if is_on_meta(model):
        model.to_empty(device="cpu")
    load_state_dict(model, None, {"model": weights})
    for callback, state in zip((c for c in task.callbacks if isinstance(c, Stateful)), states, strict=True):
        callback.load_state_dict(state)
    # The rank ended normally for our launcher, but not for the process that started this one.
    exit_code = exit_code_of(result.stopped, has_launcher=False)
    returned: FitResult = replace(result, exit_code=exit_code, model=model)
    return returned
