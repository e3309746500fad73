"""The facts of a task: it is imported, its model is built without memory, one sample is loaded; nothing is trained."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.finding import NotChecked
from lockstep.study.doctor.gather.aside import Aside, Silent, Tell
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.target import names_task
from lockstep.study.doctor.topics.task import TaskFacts
from lockstep.train.task import Task, build_model, load_task


class TaskFails(Exception):
    """The file of a task, or the function that makes it, fails; the message says where and how."""


ALL_S = 6.0
"""How long a task's own functions may take together: with the rest it must stay under ten seconds."""

STEPS = (("the task", 5.0), ("the model of the task", 2.0), ("the data set of the task", ALL_S))
"""What the process that looks at a task tells, in this order, and how long it may take for each."""

FACTS, MISSED, ABSENT, FAILS = "facts", "missed", "absent", "fails"

_SYNCHRONISED = "SyncBatchNorm"


def task_facts(spec: str, plan: Plan, seconds: float = ALL_S) -> tuple[TaskFacts | None, list[NotChecked]]:
    """Return what the task that ``spec`` names tells, and what it does not. Blocks at most ``seconds``.

    The task's own code runs in a process of its own, which has ended when this returns.

    Raises:
        TaskFails: Its file fails, or the function that makes it.
        ConfigurationError: The file has no task of the name that was given.
    """
    deadline = time.monotonic() + seconds
    fields: dict[str, Any] = {}
    missed: list[NotChecked] = []
    with Aside(view_run, spec) as aside:
        for number, (what, limit_s) in enumerate(STEPS):
            try:
                kind, told = aside.receive(min(limit_s, deadline - time.monotonic()))
            except Silent as error:
                missed.append(NotChecked(what, str(error)))
                missed += [NotChecked(later, f"{what} comes before it") for later, _ in STEPS[number + 1 :]]
                break
            if kind == FACTS:
                fields |= told
            elif kind == FAILS:
                raise TaskFails(told)
            elif kind == ABSENT and names_task(spec):
                raise ConfigurationError(told)
            else:
                missed.append(NotChecked(what, told.splitlines()[0].rstrip(".")))
            if kind == ABSENT:
                break
    return TaskFacts(world_size=plan.world_size, **fields) if fields else None, missed


def view_run(tell: Tell, spec: str) -> None:
    """Tell the facts of `STEPS`, or why there are none. Runs the user's code."""
    try:
        task = load_task(spec)
    except ConfigurationError as error:
        tell((ABSENT if error.__cause__ is None else FAILS, str(error)))
        return
    basics = {"name": task.name, "global_batch_size": task.global_batch_size, "drop_last": task.drop_last}
    tell((FACTS, basics))
    for facts_of in (_model, _data):
        try:
            tell((FACTS, facts_of(task)))
        except Exception as error:
            first = (str(error) or "no message").splitlines()[0]
            tell((MISSED, first if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {first}"))


def _model(task: Task) -> dict[str, Any]:
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
    return {
        "batchnorms": names,
        "weight_bytes": sum(tensor.nbytes for tensor in weights),
        "trained_bytes": sum(tensor.nbytes for tensor in trained),
    }


def _data(task: Task) -> dict[str, Any]:
    """Return the number of samples, the bytes of the first, and how long it takes to load; nothing of a stream."""
    dataset: Any = task.dataset()
    if isinstance(dataset, IterableDataset):
        return {}
    count = len(dataset)
    if count == 0:
        return {"num_samples": 0}
    dataset[0]  # the first time opens files
    began = time.perf_counter()
    sample = dataset[0]
    return {"num_samples": count, "sample_bytes": num_bytes(sample), "sample_s": time.perf_counter() - began}


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
