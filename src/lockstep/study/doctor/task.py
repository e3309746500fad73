"""A task, read in a process of its own that is ended in time: it is imported, its model built without memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.findings import (
    HANG,
    NOTE,
    SLOW,
    WRONG,
    Facts,
    NotChecked,
    Plan,
    Problem,
    check,
    listed,
    plural,
    size,
)
from lockstep.train.task import Task, build_model, load_task

T = TypeVar("T")

ALL_S = 6.0
"""How long a task's own functions may take together: with the rest it must stay under ten seconds."""

_STEPS = (("the task", 5.0), ("the model of the task", 2.0), ("the data set of the task", ALL_S))
"""What the process that reads a task sends, in this order, and how long it may take for each."""

_SECTION = "Tasks"
_FEW_FOR_STATISTICS = 16
"""Mean and variance of fewer samples are so noisy that accuracy suffers, as papers on batch norm found."""


@dataclass(frozen=True)
class TaskFacts(Facts):
    """What a task says without being trained.

    Attributes:
        name: Its own.
        global_batch_size: Samples in a step over all devices.
        world_size: Devices.
        num_samples: In the data set; ``None`` for a stream, or if it was not built.
        drop_last: Whether a last batch that is not full is left out.
        batchnorms: Names of the BatchNorm layers that are not synchronised; ``None`` if the model was not built.
        weight_bytes: Of parameters and buffers.
        trained_bytes: Of the parameters that are trained.
        sample_bytes: Of the first sample's tensors and arrays; ``None`` if it was not loaded.
        sample_s: How long it took to load it, the second time.
    """

    section, topic = _SECTION, "task"

    name: str
    global_batch_size: int
    world_size: int
    num_samples: int | None = None
    drop_last: bool = False
    batchnorms: tuple[str, ...] | None = None
    weight_bytes: int | None = None
    trained_bytes: int = 0
    sample_bytes: int | None = None
    sample_s: float | None = None

    @property
    def share(self) -> int:
        """Samples of each device in a step; of the largest part if they differ."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Weights, and twice those that are trained for an optimizer such as Adam."""
        return None if self.weight_bytes is None else self.weight_bytes + 2 * self.trained_bytes

    @property
    def batch_bytes(self) -> int | None:
        """Of one device's batch."""
        return None if self.sample_bytes is None else self.sample_bytes * self.share

    @property
    def summary(self) -> str:
        """What the task is."""
        parts = [f"{self.name}: global batch {self.global_batch_size}, {self.share} on each of {self.world_size}"]
        if self.num_samples is not None:
            parts.append(f"{self.num_samples:,} samples")
        if self.weight_bytes is not None:
            parts.append(f"{size(self.weight_bytes)} of weights")
        if self.sample_s is not None:
            parts.append(f"a sample loads in {1e3 * self.sample_s:.2g} ms")
        return ", ".join(parts)


@dataclass(frozen=True)
class TaskFailure(Facts):
    """That the file of a task, or the function that makes it, fails with ``message``."""

    section, topic = _SECTION, "task"

    target: str
    message: str


def read_task(
    spec: str, plan: Plan, *, is_named: bool, seconds: float = ALL_S
) -> tuple[Facts | None, list[NotChecked]]:
    """Return what the task that ``spec`` names says, and what it does not. Blocks at most ``seconds``.

    The task's own code runs in a process of its own, which has ended when this returns.

    Raises:
        ConfigurationError: The file has no task, although ``is_named``: the name of one was given.
    """
    deadline = time.monotonic() + seconds
    fields: dict[str, Any] = {}
    missed: list[NotChecked] = []
    with ProbeProcess(send_facts, spec) as probe:
        for number, (what, limit_s) in enumerate(_STEPS):
            try:
                kind, value = probe.receive(min(limit_s, deadline - time.monotonic()))
            except TimeoutError as error:
                missed.append(NotChecked(what, str(error)))
                missed += [NotChecked(later, f"{what} comes before it") for later, _ in _STEPS[number + 1 :]]
                break
            if kind == "facts":
                fields |= value
            elif kind == "failed":
                return TaskFailure(spec, value), []
            elif kind == "absent" and is_named:
                raise ConfigurationError(value)
            else:
                missed.append(NotChecked(what, value.splitlines()[0].rstrip(".")))
            if kind == "absent":
                break
    return TaskFacts(world_size=plan.world_size, **fields) if fields else None, missed


def send_facts(send: Callable[[Any], None], spec: str) -> None:
    """Send the facts of `_STEPS`, or why there are none. Runs the user's code."""
    try:
        task = load_task(spec)
    except ConfigurationError as error:
        send(("absent" if error.__cause__ is None else "failed", str(error)))
        return
    send(("facts", {"name": task.name, "global_batch_size": task.global_batch_size, "drop_last": task.drop_last}))
    for facts_of in (_model_facts, _data_facts):
        try:
            send(("facts", facts_of(task)))
        except Exception as error:
            first = (str(error) or "no message").splitlines()[0]
            send(("missed", first if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {first}"))


def _model_facts(task: Task) -> dict[str, Any]:
    try:
        with torch.device("meta"):
            model = build_model(task)
    except Exception:  # it looks at the values of its weights, so it must have some
        model = build_model(task)
    names = tuple(
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not type(module).__name__.endswith("SyncBatchNorm")  # torch's or ours
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "batchnorms": names,
        "weight_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "trained_bytes": sum(tensor.nbytes for tensor in trained),
    }


def _data_facts(task: Task) -> dict[str, Any]:
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
    own: object = getattr(value, "nbytes", None)
    return own if isinstance(own, int) else 8


class ProbeProcess:
    """A process that runs ``function(send, *args)``; forked, so that it has all modules at once.

    A context manager: leaving the block ends the process and all that it has started. What it prints goes to stderr.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe(duplex=False)
        # Not a daemon: those may have no children, and a loader of the user's may want some.
        self._process = context.Process(target=_run_probe, args=(theirs, function, args), name="lockstep-doctor")
        with warnings.catch_warnings():
            # Python warns that a fork with threads may hang; this one is ended when its time is up.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def receive(self, seconds: float) -> Any:
        """Return the next value. Blocks at most ``seconds``.

        Raises:
            TimeoutError: Nothing came in time, or the process ended without a word; the message says which.
        """
        if not self._ours.poll(max(0.0, seconds)):
            raise TimeoutError("it took too long")
        try:
            return self._ours.recv()
        except EOFError:
            self._process.join(1.0)
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise TimeoutError(f"its process ended with {how}") from None

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pid = self._process.pid
        assert pid is not None
        # The process made a group of its own; right after the fork it has not yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._ours.close()


def _run_probe(ours: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked ends this one
    sys.stdout = sys.stderr
    os.dup2(2, 1)  # also for what is not Python
    function(ours.send, *args)
    ours.close()


def in_time(seconds: float, action: Callable[[], T]) -> T:
    """Return what ``action`` returns, or raise what it raises. Blocks at most ``seconds``.

    What is not over then goes on in a thread that ends with the process: a name server or a file system that does not
    answer cannot be stopped from outside.

    Raises:
        TimeoutError: It was not over in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="lockstep-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


@check(TaskFailure)
def task_fails(facts: TaskFailure) -> Iterator[Problem]:
    """The task's file, or the function that makes the task, raises an error, which is shown with its line.

    Cost: The run fails in the same way, on every rank.
    Fix: Correct what it says.
    """
    yield Problem(HANG, f"The task cannot be made: {facts.message}", f"lockstep train {facts.target} --steps 1")


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
    Fix: Synchronise them, or train in reproducible mode, or use a norm that looks at one sample.
    """
    if facts.batchnorms and facts.world_size > 1:
        layers = f"{plural(len(facts.batchnorms), 'BatchNorm layer')} ({listed(list(facts.batchnorms), 2)})"
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
