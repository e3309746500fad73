"""`evaluate` and `predict`: a trained model on a data set, on any number of devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.base.accelerator import check_count
from lockstep.base.containers import find_tensors, map_tensors
from lockstep.base.env import Launcher, RankEnv
from lockstep.checkpoints.model_state import load_state_dict, plain_names
from lockstep.comm.collectives import gather_states, is_initialized
from lockstep.comm.fully_shard import whole
from lockstep.comm.world import World, init
from lockstep.data.loader import LoadOptions, MicroBatch, explaining_worker_failures
from lockstep.data.order import BatchSplit
from lockstep.errors import ConfigurationError
from lockstep.train.evaluate import Evaluator, Inference
from lockstep.train.result import FitResult
from lockstep.train.settings import Precision, Settings
from lockstep.train.step_parts import autocast
from lockstep.train.strategies.reproducible import Arithmetic, virtual_shards
from lockstep.train.task import Task, build_dataset, build_model, prepare

# A module with weights, or the checkpoint or the exported file that has them.
Weights = nn.Module | str | os.PathLike[str]
Forward = Callable[[nn.Module, Any], Any]


def evaluate(  # noqa: D417 - some arguments share a line
    task: Task,
    *,
    model: Weights,
    best: bool = False,
    devices: int | None = None,
    global_batch_size: int | None = None,
    precision: Precision = "fp32",
    workers: int = 0,
    reproducible: int | None = None,
) -> dict[str, float]:
    """Return the loss and the metrics of a model on the task's evaluation data, by name.

    Each sample counts once, on any number of devices; each device has the whole model. Without a process group,
    ``devices=N`` starts N ranks as `fit` does. Otherwise, collective: every rank; all get the same numbers. Blocks.

    Args:
        task: The task, with ``eval_dataset``.
        model: A model with the weights, such as ``result.model``, or where they are: the folder of a run or of a
            checkpoint, or a file that ``export`` has written. They are loaded into what `Task.model` returns.
        best: Whether to read the best checkpoint of a run; the newest otherwise.
        devices, global_batch_size, precision, workers, reproducible: As for `fit`.

    Raises:
        ConfigurationError: The task has no evaluation data, or the weights do not fit its model.
        CheckpointError: They cannot be read.
    """
    options = {"global_batch_size": global_batch_size, "precision": precision, "workers": workers}
    return evaluate_at(task, model=model, best=best, devices=devices, reproducible=reproducible, **options)[1]


def evaluate_at(
    task: Task, *, model: Weights, best: bool, devices: int | None, **options: Any
) -> tuple[int | None, dict[str, float]]:
    """Return what `evaluate` does, after the step of the run whose weights these are, if it is known."""
    if task.eval_dataset is None:
        raise ConfigurationError("evaluate needs eval_dataset.\nAdd eval_dataset=... to the task.")
    arguments = task, Settings(**options), _portable(model, best), best
    measured: tuple[int | None, dict[str, float]] = _on_ranks(_evaluate, arguments, devices)
    return measured


def predict(  # noqa: D417 - some arguments share a line
    task: Task,
    dataset: Any,
    *,
    model: Weights,
    forward: Forward | None = None,
    best: bool = False,
    devices: int | None = None,
    global_batch_size: int | None = None,
    precision: Precision = "fp32",
    workers: int = 0,
    reproducible: int | None = None,
) -> Any:
    """Return the outputs of a model for a data set: one a sample, in its order, on any number of devices.

    As `evaluate`, but for these arguments.

    Args:
        task: What made the model: its ``collate`` and ``global_batch_size`` are used.
        dataset: The samples, with ``len`` and ``[]``.
        model: As for `evaluate`.
        forward: Maps ``(model, batch)`` to the outputs: a tensor with a row for each sample, or a container of such
            tensors. By default ``model(batch)``, or ``model(batch[0])`` if a batch is a list or tuple.
        best: As for `evaluate`.
        devices, global_batch_size, precision, workers, reproducible: As for `fit`.

    Returns:
        What ``forward`` returns, with ``len(dataset)`` rows, on the CPU.

    Raises:
        ConfigurationError: The data set is a stream or empty, or an output has not one row for each sample.
    """
    if isinstance(dataset, IterableDataset) or len(dataset) == 0:
        raise ConfigurationError(
            "predict needs a data set with samples, len() and [], as outputs have its order.\n"
            "Give one, or list(...) of the samples of a stream."
        )
    settings = Settings(
        global_batch_size=global_batch_size, precision=precision, workers=workers, reproducible=reproducible
    )
    if forward is not None and not callable(forward):
        raise ConfigurationError(f"forward={forward!r} is not a function.\nGive one of (model, batch), or omit it.")
    args = task, dataset, settings, _portable(model, best), best, forward or _forward
    return _on_ranks(_predict, args, devices)


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, list | tuple) else batch)


def _portable(model: Weights, best: bool) -> dict[str, Any] | str:
    """Return weights on the CPU by name, which can be sent to ranks, or a path. Collective if they are sharded.

    Raises:
        ConfigurationError: It is neither, or there is no best one of it.
    """
    given: object = model
    if not isinstance(given, nn.Module | str | os.PathLike):
        advice = "Give the model of the result: model=result.model." if isinstance(given, FitResult) else ""
        raise ConfigurationError(
            f"model is a {type(given).__name__}, not a module or a path.\n"
            f"{advice or 'Give a model, or where its weights are.'}"
        )
    if best and (isinstance(model, nn.Module) or os.fspath(model).endswith(".safetensors")):
        raise ConfigurationError("best needs the folder of a run.\nName one, or omit best (--best).")
    if not isinstance(model, nn.Module):
        return os.fspath(model)
    state = {name: whole(value) for name, value in plain_names(model.state_dict()).items()}
    copied: dict[str, Any] = map_tensors(state, lambda tensor: tensor.detach().cpu())
    return copied


def _on_ranks(function: Callable[..., Any], arguments: tuple[Any, ...], devices: int | None) -> Any:
    """Call ``function`` in this process, which may be a rank, or in ranks that are started for it."""
    is_rank = RankEnv.from_environ(os.environ).launcher is not Launcher.NONE or is_initialized()
    if is_rank or (devices or 1) == 1:
        return function(*arguments)
    from lockstep.launcher.api import launch, raising_task_errors  # which is slow to import

    check_count(devices or 1)
    with raising_task_errors():
        return launch(function, *arguments, devices=devices)[0]


@contextlib.contextmanager
def _inference(
    task: Task, settings: Settings, weights: dict[str, Any] | str, best: bool
) -> Iterator[tuple[Task, Inference, int | None]]:
    """Yield the task, its model with the weights on the device of this rank, and their step. Collective: every rank."""
    opened = World.opened
    with init() if opened is None else contextlib.nullcontext(opened) as world, explaining_worker_failures(world.rank):
        task, is_exact = prepare(task, world), settings.reproducible is not None
        model, step = build_model(task, world.device), None
        if isinstance(weights, dict):
            _load(model, weights)
        elif weights.endswith(".safetensors"):
            from safetensors.torch import load_model

            if not Path(weights).is_file():
                raise ConfigurationError(f"{weights} does not exist.\nName a file that --export has written.")
            load_model(model, weights)
        else:
            from lockstep.loop.saving import load

            step = load(weights, model=model, best=best).get("num_steps_done")
        size = settings.global_batch_size or task.global_batch_size
        shards = virtual_shards("ddp", world, [world.device], settings)
        split = BatchSplit(world.world_size, range(world.rank, world.rank + 1), 1) if shards is None else shards.split
        loading = LoadOptions(task.collate, settings.workers, world.device.type != "cpu")
        arithmetic = Arithmetic(1 if is_exact else None, is_exact)
        group = world.group if world.world_size > 1 else None
        yield task, Inference(model, settings, split, size, loading, arithmetic, world.device, group), step


def _load(model: nn.Module, weights: dict[str, Any]) -> None:
    try:
        load_state_dict(model, None, {"model": weights})
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The weights do not fit the model of the task: {error}\nGive those of a model that Task.model returns."
        ) from error


def _evaluate(
    task: Task, settings: Settings, weights: dict[str, Any] | str, best: bool
) -> tuple[int | None, dict[str, float]]:
    with _inference(task, settings, weights, best) as (task, inference, step):
        evaluator = Evaluator(task, lambda: inference, build_dataset(task, evaluation=True))
        evaluator.try_out()
        return step, evaluator.run()


def _predict(
    task: Task, dataset: Any, settings: Settings, weights: dict[str, Any] | str, best: bool, forward: Forward
) -> Any:
    with _inference(task, settings, weights, best) as (_, inference, _step):
        outputs: list[Any] = []

        def act(_number: int, micro: MicroBatch) -> None:
            (batch,), (num_samples,) = micro.batches, micro.sizes
            with autocast(settings.precision, inference.device):
                output = forward(inference.model, batch)
            outputs.append(map_tensors(output, partial(_checked, num_samples)))

        inference.alone().run([dataset[0]], act)  # so that ranks without samples know what an output is
        template = map_tensors(outputs.pop(), lambda tensor: tensor[:0])
        inference.run(dataset, act)
        row = [torch.cat(batches) for batches in zip(*map(find_tensors, [template, *outputs]), strict=True)]
        ranks = [row] if inference.group is None else gather_states(row, group=inference.group, device=inference.device)
        rows = map(torch.cat, zip(*ranks, strict=True))
        return map_tensors(template, lambda _: next(rows))


def _checked(num_samples: int, output: Tensor) -> Tensor:
    if output.shape[:1] != (num_samples,):
        raise ConfigurationError(
            f"An output for {num_samples} samples has the shape {tuple(output.shape)}.\n"
            "Return one row for each sample from the model, or give forward=..., which does."
        )
    return output.cpu()
