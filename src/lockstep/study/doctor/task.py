"""A task, read with a time limit: the file is imported, and its model built without memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import IterableDataset

from lockstep.activity import in_time, one_line
from lockstep.study.doctor.findings import NotChecked, Plan, Problem, Severity, check, cost, fix, listed, paste
from lockstep.telemetry.rank_state import format_bytes
from lockstep.torch_internals import BatchNorm
from lockstep.train.plan import plural
from lockstep.train.task import Task, build_model, load_task

# Time limit for the task's own functions; the whole examination takes less than ten seconds.
LIMIT_S = 6.0

# Statistics of fewer samples are so noisy that accuracy suffers, as papers on batch norm found.
_FEW_FOR_STATISTICS = 16


@dataclass(frozen=True)
class TaskFacts:
    """What is known about a task without training it.

    Attributes:
        name: Its name.
        global_batch_size: Samples of a step on all devices.
        world_size: Number of devices.
        num_samples: Size of the data set; ``None`` for a stream, or if the data set was not built.
        drop_last: Whether an incomplete last batch is left out.
        batchnorms: Names of the BatchNorm layers that are not synchronised.
        weight_bytes: Size of parameters and buffers; 0 if the model was not built.
        trained_bytes: Size of the trained parameters.
    """

    name: str
    global_batch_size: int
    world_size: int
    num_samples: int | None = None
    drop_last: bool = False
    batchnorms: Sequence[str] = ()
    weight_bytes: int = 0
    trained_bytes: int = 0

    @property
    def share(self) -> int:
        """Samples of each device in a step; the largest number if they differ."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the weights, and of an optimizer state such as Adam's: twice the trained weights."""
        return self.weight_bytes + 2 * self.trained_bytes

    @property
    def largest_batch(self) -> int:
        """The largest global batch that the data set fills."""
        return max(self.world_size, self.num_samples or 0)

    @property
    def seen(self) -> dict[str, str]:
        """A line about batch, data and weights."""
        samples = "" if self.num_samples is None else f", {self.num_samples:,} samples"
        weights = f", {format_bytes(self.weight_bytes)} of weights" if self.weight_bytes else ""
        batch = f"global batch {self.global_batch_size}, {self.share} on each of {self.world_size}"
        return {"task": f"{self.name}: {batch}{samples}{weights}"}


def read_task(spec: str, plan: Plan, *, limit_s: float = LIMIT_S) -> tuple[TaskFacts | None, list[NotChecked]]:
    """Return the facts of the task that ``spec`` names, and what is unknown. Blocks at most ``limit_s``.

    Imports the file, and calls functions of the task, in another thread of this process.

    Raises:
        ConfigurationError: The file has no task, or fails; names the line.
    """
    fields: dict[str, Any] = {}
    unknown = dict.fromkeys(_PARTS, "it took too long")

    def read() -> None:
        task = load_task(spec)
        if task.prepare is not None:
            try:
                task.prepare()
            except Exception as error:
                unknown["Task.prepare"] = one_line(error)
        for what, facts_of in _PARTS.items():
            try:
                fields.update(facts_of(task))
                del unknown[what]
            except Exception as error:
                unknown[what] = one_line(error)

    with redirect_stdout(sys.stderr), suppress(TimeoutError):  # standard output is for the report, which may be JSON
        in_time(limit_s, read)
    missed = [NotChecked(what, because) for what, because in list(unknown.items())]
    return TaskFacts(world_size=plan.world_size, **fields) if fields else None, missed


def _own_facts(task: Task) -> dict[str, Any]:
    return {"name": task.name, "global_batch_size": task.global_batch_size, "drop_last": task.drop_last}


class _NoDraws(TorchFunctionMode):
    """In this context, parameters get no normally distributed values.

    For these torch imports its compiler on the meta device, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_, nn.init.trunc_normal_):
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def _model_facts(task: Task) -> dict[str, Any]:
    try:
        with torch.device("meta"), _NoDraws():  # no memory: the model may be larger than this machine
            model = build_model(task, keeps_meta=True)
    except Exception:  # a model that reads the values of its weights needs memory
        model = build_model(task)
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and not type(module).__name__.endswith("SyncBatchNorm")  # torch's or ours
    ]
    return {
        "batchnorms": names,
        "weight_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "trained_bytes": sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
    }


def _data_facts(task: Task) -> dict[str, Any]:
    dataset: Any = task.dataset()
    return {} if isinstance(dataset, IterableDataset) else {"num_samples": len(dataset)}


_PARTS = {"the task": _own_facts, "the model of the task": _model_facts, "the data set of the task": _data_facts}


@check(TaskFacts, Severity.SLOW)
@cost("Each epoch is one step, in which devices have little or no work; with drop_last the run fails at the start.")
@fix("Use a smaller global batch.")
@paste("lockstep train TASK.py --global-batch-size {largest_batch}")
def dataset_too_small(facts: TaskFacts) -> Iterator[Problem]:
    """The data set has fewer samples than one global batch."""
    if facts.num_samples is not None and facts.num_samples < facts.global_batch_size:
        samples = plural(facts.num_samples, "sample")
        found = f"The data set has {samples}, fewer than a global batch of {facts.global_batch_size}."
        yield Problem(found, severity=Severity.HANG if facts.drop_last else Severity.SLOW)


@check(TaskFacts, Severity.NOTE)
@cost("The run differs from one on a single device.")
@fix("Synchronise the layers, train in reproducible mode, or use a norm that needs one sample only.")
@paste(
    "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)  # in the function of Task.model",
    "lockstep train TASK.py --reproducible {world_size}  # or this",
)
def batchnorm_not_synchronised(facts: TaskFacts) -> Iterator[Problem]:
    """BatchNorm normalises with the mean and variance of the rank's own samples.

    Statistics of fewer than 16 samples cost accuracy, and are reported as wrong. ``lockstep verify`` measures the
    difference between the runs.
    """
    if facts.batchnorms and facts.world_size > 1:
        layers = f"{plural(len(facts.batchnorms), 'BatchNorm layer')} ({listed(facts.batchnorms, 2)})"
        own = f"the {plural(facts.share, 'sample')} of their own device, of {facts.global_batch_size}"
        severity = Severity.WRONG if facts.share < _FEW_FOR_STATISTICS else Severity.NOTE
        yield Problem(f"{layers} will normalise with {own}.", severity=severity)
