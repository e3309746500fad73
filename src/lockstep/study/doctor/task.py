"""A task, read in a process of its own that is ended in time: it is imported, its model built without memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.findings import HANG, NOTE, SLOW, WRONG, NotChecked, Plan, Problem, check, listed, plural
from lockstep.telemetry.rank_state import format_bytes
from lockstep.train.task import Task, build_model, load_task

# How long a task's own functions may take together: with the rest it must stay under ten seconds.
ALL_S = 6.0

_PARTS = ("the task", "the model of the task", "the data set of the task")

# Mean and variance of fewer samples are so noisy that accuracy suffers, as papers on batch norm found.
_FEW_FOR_STATISTICS = 16


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task without training it.

    Attributes:
        name: Its own.
        global_batch_size: Samples in a step over all devices.
        world_size: Devices.
        num_samples: In the data set; ``None`` for a stream, or if it was not built.
        drop_last: Whether a last batch that is not full is left out.
        batchnorms: Names of the BatchNorm layers that are not synchronised.
        weight_bytes: Of parameters and buffers; 0 if the model was not built.
        trained_bytes: Of the parameters that are trained.
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
        """Samples of each device in a step; of the largest part if they differ."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights, and twice those that are trained for an optimizer such as Adam."""
        return self.weight_bytes + 2 * self.trained_bytes

    @property
    def summary(self) -> str:
        """Batch, data and weights."""
        samples = "" if self.num_samples is None else f", {self.num_samples:,} samples"
        weights = f", {format_bytes(self.weight_bytes)} of weights" if self.weight_bytes else ""
        batch = f"global batch {self.global_batch_size}, {self.share} on each of {self.world_size}"
        return f"{self.name}: {batch}{samples}{weights}"


def read_task(
    spec: str, plan: Plan, *, is_named: bool, seconds: float = ALL_S
) -> tuple[TaskFacts | None, list[NotChecked]]:
    """Return the facts of the task that ``spec`` names, and what is unknown of it. Blocks at most ``seconds``.

    The task's own code runs in a process of its own, which has ended when this returns.

    Raises:
        ConfigurationError: The file has no task, although ``is_named``: the name of one was given; or making it fails.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_probe, args=(sender, spec))
    with warnings.catch_warnings():
        # Python warns that a fork with threads may hang; this one is ended when its time is up.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()  # then the process is the only one that has this end, and its own end is that of the pipe
    assert process.pid is not None
    fields: dict[str, Any] = {}
    missed: list[NotChecked] = []
    left, because = list(_PARTS), "it took too long"
    ends_at = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, ends_at - time.monotonic())):
            found, reason = receiver.recv()
            fields |= found
            what = left.pop(0)
            if reason:
                missed.append(NotChecked(what, reason))
    except EOFError:
        process.join()
        because = f"its process ended with exit code {process.exitcode}"
    finally:
        # The process made a group of its own, for what it has started; right after the fork it has not yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    if "error" in fields or ("absent" in fields and is_named):
        raise ConfigurationError(*fields.values())
    if "absent" in fields:
        return None, [NotChecked("the task", fields["absent"].partition("\n")[0])]
    missed += [NotChecked(what, because) for what in left]
    return TaskFacts(world_size=plan.world_size, **fields) if fields else None, missed


def _probe(sender: Connection, spec: str) -> None:
    """Send the facts of each of `_PARTS`, or why there are none. Runs the user's code."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked ends this one
    sys.stdout = sys.stderr  # standard output is for the report, which may be JSON
    os.dup2(2, 1)  # also for what is not Python
    try:
        task = load_task(spec)
    except ConfigurationError as error:
        sender.send(({"absent" if error.__cause__ is None else "error": str(error)}, ""))
        return
    own = {"name": task.name, "global_batch_size": task.global_batch_size, "drop_last": task.drop_last}
    sender.send((own, ""))
    for facts_of in (_model_facts, _data_facts):
        try:
            sender.send((facts_of(task), ""))
        except Exception as error:
            first = str(error).partition("\n")[0]
            sender.send(({}, f"{type(error).__name__}: {first}"))


def _model_facts(task: Task) -> dict[str, Any]:
    try:
        with torch.device("meta"):  # no memory: the model may be larger than this machine
            model = build_model(task)
    except Exception:  # it reads the values of its weights, so it must have some
        model = build_model(task)
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not type(module).__name__.endswith("SyncBatchNorm")  # torch's or ours
    ]
    return {
        "batchnorms": names,
        "weight_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "trained_bytes": sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
    }


def _data_facts(task: Task) -> dict[str, Any]:
    dataset: Any = task.dataset()
    return {} if isinstance(dataset, IterableDataset) else {"num_samples": len(dataset)}


@check(TaskFacts)
def dataset_too_small(facts: TaskFacts) -> Iterator[Problem]:
    """The data set has fewer samples than one global batch.

    Cost: Each epoch is one step, in which devices have little to do or nothing; with drop_last the run is refused.
    Fix: Make the global batch smaller.
    """
    count = facts.num_samples
    if count is not None and count < facts.global_batch_size:
        found = f"The data set has {plural(count, 'sample')}, fewer than a global batch of {facts.global_batch_size}."
        paste = f"lockstep train TASK.py --global-batch-size {max(facts.world_size, count)}"
        yield Problem(HANG if facts.drop_last else SLOW, found, paste)


@check(TaskFacts)
def batchnorm_not_synchronised(facts: TaskFacts) -> Iterator[Problem]:
    """BatchNorm normalises with mean and variance of the rank's own samples.

    Statistics of fewer than 16 samples cost accuracy, and are reported as wrong. ``lockstep verify`` measures how far
    apart the runs come.

    Cost: It is another run than on one device.
    Fix: Synchronise them, or train in reproducible mode, or use a norm that needs one sample only.
    """
    if facts.batchnorms and facts.world_size > 1:
        layers = f"{plural(len(facts.batchnorms), 'BatchNorm layer')} ({listed(facts.batchnorms, 2)})"
        own = f"the {plural(facts.share, 'sample')} of their own device, of {facts.global_batch_size}"
        convert = "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)  # in the function of Task.model"
        paste = f"{convert}\nlockstep train TASK.py --reproducible {facts.world_size}  # or this"
        severity = WRONG if facts.share < _FEW_FOR_STATISTICS else NOTE
        yield Problem(severity, f"{layers} will normalise with {own}.", paste)


@check(TaskFacts)
def last_batch_tiny(facts: TaskFacts) -> Iterator[Problem]:
    """The last batch of an epoch has fewer than two samples for each device, and the model has BatchNorm.

    Without BatchNorm, ``fit`` trains on such a batch exactly.

    Cost: BatchNorm on a single sample is an error, or statistics that mean nothing.
    Fix: Leave that batch out.
    """
    rest, devices = (facts.num_samples or 0) % facts.global_batch_size, facts.world_size
    if facts.batchnorms and devices > 1 and 0 < rest < 2 * devices and not facts.drop_last:
        found = f"The last batch of an epoch has {plural(rest, 'sample')} for {plural(devices, 'device')}."
        yield Problem(WRONG, found, "drop_last=True,  # in lockstep.Task(...)")
