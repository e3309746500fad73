"""The facts of a task: it is imported, its model is built without memory, one sample is loaded; nothing is trained."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.finding import NotChecked
from lockstep.study.doctor.gather.in_time import in_time
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.target import names_task
from lockstep.study.doctor.topics.task import TaskFacts
from lockstep.train.load import load_task
from lockstep.train.task import Task, build_model


class TaskFails(Exception):
    """The file of a task, or the function that makes it, fails; the message says where and how."""


IMPORT_S, MODEL_S, ALL_S = 5.0, 2.0, 6.0
"""How long a task's own functions may take, alone and together: with the rest it must stay under ten seconds."""

_SYNCHRONISED = "SyncBatchNorm"


def task_facts(spec: str, plan: Plan) -> tuple[TaskFacts | None, list[NotChecked]]:
    """Return what the task that ``spec`` names tells, and what it does not. Blocks some seconds at most.

    Raises:
        TaskFails: Its file fails, or the function that makes it.
        ConfigurationError: The file has no task of the name that was given.
    """
    # What a task prints is not part of the report.
    deadline = time.monotonic() + ALL_S
    with contextlib.redirect_stdout(sys.stderr):
        loaded = in_time(IMPORT_S, lambda: load_task(spec))
        if isinstance(loaded.error, ConfigurationError):
            if loaded.error.__cause__ is not None:
                raise TaskFails(str(loaded.error))
            if names_task(spec):
                raise loaded.error
        if loaded.value is None:
            return None, [
                NotChecked(f"the task of {spec}", _why(loaded.error, f"it was not imported within {IMPORT_S:g} s"))
            ]
        task, missed = loaded.value, []
        model = in_time(min(MODEL_S, deadline - time.monotonic()), lambda: _model(task))
        if model.value is None:
            late = f"it was not built within {MODEL_S:g} s"
            missed.append(NotChecked("the model of the task", _why(model.error, late)))
        data = in_time(deadline - time.monotonic(), lambda: _data(task))
        if data.value is None:
            late = f"it was not there within the {ALL_S:g} s for the task"
            missed.append(NotChecked("the data set of the task", _why(data.error, late)))
    num_samples, sample_bytes, sample_s = data.value or (None, None, None)
    batchnorms, weight_bytes, trained_bytes = model.value or (None, None, 0)
    facts = TaskFacts(
        name=task.name,
        global_batch_size=task.global_batch_size,
        world_size=plan.world_size,
        num_samples=num_samples,
        drop_last=task.drop_last,
        batchnorms=batchnorms,
        weight_bytes=weight_bytes,
        trained_bytes=trained_bytes,
        sample_bytes=sample_bytes,
        sample_s=sample_s,
    )
    return facts, missed


def _why(error: BaseException | None, late: str) -> str:
    if error is None:
        return late
    first = (str(error) or "no message").splitlines()[0]
    return first if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {first}"


def _model(task: Task) -> tuple[tuple[str, ...], int, int]:
    """Return the names of BatchNorm layers that are not synchronised, and bytes of all weights and of the trained."""
    try:
        with torch.device("meta"):
            model = build_model(task)
    except Exception:  # it looks at the values of its weights, so it must have some
        model = build_model(task)
    names = tuple(
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not type(module).__name__.endswith(_SYNCHRONISED)
    )
    weights = [*model.parameters(), *model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return names, sum(tensor.nbytes for tensor in weights), sum(tensor.nbytes for tensor in trained)


def _data(task: Task) -> tuple[int | None, int | None, float | None]:
    """Return the number of samples, the bytes of the first, and how long it takes to load."""
    dataset: Any = task.dataset()
    if isinstance(dataset, IterableDataset):
        return None, None, None
    count = len(dataset)
    if count == 0:
        return 0, None, None
    dataset[0]  # the first time opens files
    began = time.perf_counter()
    sample = dataset[0]
    return count, num_bytes(sample), time.perf_counter() - began


def num_bytes(value: Any) -> int:
    """Return the bytes of the tensors and arrays in a sample."""
    if isinstance(value, (list, tuple)):
        return sum(num_bytes(part) for part in value)
    if isinstance(value, dict):
        return sum(num_bytes(part) for part in value.values())
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    size: object = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else 8
