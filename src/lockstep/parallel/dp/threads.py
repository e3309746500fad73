"""Run each replica in its own persistent thread: forward for outputs, forward and backward for gradients."""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_internals import ExceptionWrapper, default_device, has_modes
from lockstep.comm.process import keep_freed_memory
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.replicas import Replicas
from lockstep.telemetry import ranges

# Called with a replica and its shard; returns the loss, a tensor of one element.
LossFunction = Callable[[nn.Module, Any], Tensor]
Scale = float | Tensor

_SIGNAL_CHECK_S = 0.5

_Results = queue.SimpleQueue[tuple[int, Any]]
_Tasks = queue.SimpleQueue["tuple[int, Callable[[], Any], _Results] | None"]


class ReplicaThreads:
    """Runs one function on each thread, all at the same time; the threads end with this object.

    A thread is started once and then waits for work. So a step starts no threads, and replica i always runs on thread
    i, where CUDA and autograd keep their thread-local state. The threads hold no reference to this object. They are
    started again in a forked child, since a fork copies only the calling thread.

    Args:
        size: How many threads.
        divide_cores: Let every thread use ``torch.get_num_threads() // size`` cores within its operations. Without it,
            each of the ``size`` threads would use all cores at the same time.
    """

    def __init__(self, size: int, *, divide_cores: bool) -> None:
        self._size, self._divide_cores = size, divide_cores
        self._threads: list[threading.Thread] = []
        self._tasks: list[_Tasks] = []
        self._stop: Callable[[], object] = lambda: None
        self._started_with: tuple[int, int] | None = None

    def run(self, functions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Call ``functions[i]`` on thread i, all of them at once, and return their results in the same order.

        Blocks until all are done, however long they take. After an interrupt (Ctrl-C), this object no longer uses the
        threads with unfinished calls; these threads end after their call.

        Args:
            functions: Functions that do not raise.
        """
        # The process may have been forked, or its number of cores may have changed.
        if self._started_with != (os.getpid(), torch.get_num_threads()):
            self._start()
        # A new queue for each run: results of calls that an interrupt abandoned must not reach the next run.
        results: _Results = queue.SimpleQueue()
        try:
            for index, function in functions.items():
                self._tasks[index].put((index, function, results))
            outcomes: dict[int, Any] = {}
            while len(outcomes) < len(functions):
                # A signal that arrives just before the wait is handled only when the wait ends: so no wait is long.
                with suppress(queue.Empty):
                    index, result = results.get(timeout=_SIGNAL_CHECK_S)
                    outcomes[index] = result
        except BaseException:
            # The next run starts new threads; the present ones end with their calls.
            self._stop()
            self._started_with = None
            raise
        return {index: outcomes[index] for index in functions}

    def refuse_inside(self) -> None:
        """Raise an error if called from one of these threads, which would wait for itself.

        Raises:
            LockstepError: The caller is one of these threads.
        """
        if threading.current_thread() in self._threads:
            raise LockstepError(
                "A DataParallel module was called from inside one of its own replicas.\n"
                "Call the wrapped module there, not the wrapper."
            )

    def _start(self) -> None:
        if self._started_with is not None and self._started_with[0] == os.getpid():
            self._stop()  # the threads of a parent process do not exist here
        total = torch.get_num_threads()
        share = max(1, total // self._size) if self._divide_cores else None
        if self._divide_cores:
            keep_freed_memory(for_threads=True)  # before they begin: a thread that has an arena keeps it
        self._tasks = [queue.SimpleQueue() for _ in range(self._size)]
        ready = threading.Barrier(self._size + 1)
        self._threads = [
            # daemons, so that a replica that hangs does not keep an interrupted process from ending
            threading.Thread(target=_work, args=(tasks, share, ready), name=f"lockstep-replica-{index}", daemon=True)
            for index, tasks in enumerate(self._tasks)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait()
        if self._divide_cores:
            # set_num_threads() sets the number of the calling thread, and also the initial number of threads that start
            # later: restore the latter.
            torch.set_num_threads(total)
        self._started_with = (os.getpid(), total)
        self._stop = weakref.finalize(self, _stop_all, self._tasks)


def _work(tasks: _Tasks, num_cores: int | None, ready: threading.Barrier) -> None:
    if num_cores is not None:
        # At the first operation that reads it, torch overwrites a thread's number with the process's: read it first.
        torch.get_num_threads()
        torch.set_num_threads(num_cores)
    ready.wait()
    while (task := tasks.get()) is not None:
        index, function, results = task
        results.put((index, function()))
        del task, function, results  # they hold inputs and outputs, which must not live until the next task


def _stop_all(queues: Sequence[_Tasks]) -> None:
    for tasks in queues:
        tasks.put(None)


class CallerModes:
    """The thread-local state of torch, copied from the calling thread to a replica's thread.

    Grad mode, inference mode, autocast, the default device, the current device and its stream belong to a thread.
    Replicas use the caller's current stream, so the work keeps the order that the caller expects. (The default dtype,
    anomaly detection, deterministic mode and the random generators belong to the process and are not copied.)

    Args:
        device: Of the replica.
        differentiates: Whether gradients are needed, whatever the caller's grad mode.
    """

    def __init__(self, device: torch.device, *, differentiates: bool = False) -> None:
        self._device: list[Callable[[], AbstractContextManager[Any]]] = []
        if device.type != "cpu":
            # The replica runs on the caller's stream, so no stream has to wait for another one before or after.
            stream = torch.accelerator.current_stream(device)
            self._device = [partial(torch.accelerator.device_index, device.index), lambda: stream]
        self._all = [*self._device]
        if (default := default_device()) is not None:
            self._all.append(partial(torch.device, default))
        if torch.is_inference_mode_enabled() and not differentiates:
            self._all.append(torch.inference_mode)
        self._all.append(partial(torch.set_grad_enabled, differentiates or torch.is_grad_enabled()))
        for kind in dict.fromkeys(("cpu", device.type)):
            if torch.is_autocast_enabled(kind):
                dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
                self._all.append(partial(torch.autocast, kind, dtype=dtype, cache_enabled=cached))

    @contextmanager
    def entered(self, *, device_only: bool = False) -> Iterator[None]:
        """Apply this state, or only device and stream, in this thread."""
        with ExitStack() as stack:
            for mode in self._device if device_only else self._all:
                stack.enter_context(mode())
            yield


class ReplicaEngine:
    """The replicas of a module and their threads. One call runs at a time; others wait for their turn.

    Attributes:
        replicas: The replicas.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.replicas = Replicas(module, devices)
        self._threads = ReplicaThreads(len(devices), divide_cores=devices[0].type == "cpu")
        self._turn = threading.RLock()  # forward holds it around replicate() and parallel_apply(), which also take it

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads from using the replicas.

        Raises:
            LockstepError: Called inside a replica.
        """
        self._threads.refuse_inside()
        with self._turn:
            yield

    def apply(self, modules: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> list[Any]:
        """Call ``modules[i](*inputs[i], **kwargs[i])`` in thread i under the caller's modes, and return the outputs.

        Raises:
            ValueError: Their numbers differ: an overridden scatter must return as many inputs as keyword arguments.
            BaseException: The error of the lowest failing replica; the text contains its traceback.
        """

        def call(module: nn.Module, arguments: Any, keywords: dict[str, Any], modes: CallerModes) -> Any:
            positional = arguments if isinstance(arguments, (tuple, list)) else (arguments,)
            with modes.entered():
                return module(*positional, **keywords)

        modes = map(CallerModes, self.replicas.devices[: len(modules)])
        calls = [partial(call, *call_arguments) for call_arguments in zip(modules, inputs, kwargs, modes, strict=True)]
        return list(self._run(dict(enumerate(calls))).values())

    def differentiate(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[Scale]
    ) -> tuple[dict[int, Tensor], float]:
        """Differentiate the loss of every shard in its replica's thread; the gradients stay in the replicas' leaves.

        A shard of None is skipped.

        Returns:
            The losses by replica, and how long it took to update the replicas.

        Raises:
            BaseException: The error of the lowest failing replica; the text contains its traceback.
        """
        # Shard i belongs to replica i, even if shards before it are missing.
        present = [index for index, shard in enumerate(shards) if shard is not None]
        if not present:
            return {}, 0.0
        start = time.perf_counter()
        modules = self.replicas.refresh(present[-1] + 1, leaves=True)
        refresh_s = time.perf_counter() - start
        modes = {index: CallerModes(self.replicas.devices[index], differentiates=True) for index in present}
        calls = {
            index: partial(differentiate, loss, modules[index], shards[index], scales[index], modes[index])
            for index in present
        }
        try:
            return self._run(calls), refresh_s
        except BaseException:
            self.replicas.drop_gradients()  # of the replicas that did not fail
            raise

    def _run(self, functions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run one function for each replica; raise the first failure."""
        guarded = {
            index: partial(_catch, function, f"in replica {index} on device {as_listed(self.replicas.devices[index])}")
            for index, function in functions.items()
        }
        try:
            # Modes and hooks of Python belong to the calling thread, and are not made for several threads at once. A
            # single replica also runs there, with all cores.
            if len(guarded) > 1 and not has_modes():
                # a context can be entered by one thread at a time
                outcomes = self._threads.run({index: partial(copy_context().run, guarded[index]) for index in guarded})
            else:
                outcomes = {index: function() for index, function in guarded.items()}
        except BaseException:  # Ctrl-C: the calls go on, with these replicas
            self.replicas.forget()
            raise
        # The lowest failing replica, not the first in time: the same error in every run.
        for outcome in outcomes.values():
            if isinstance(outcome, ExceptionWrapper):
                outcome.reraise()
        return outcomes


def differentiate(loss: LossFunction, module: nn.Module, shard: Any, scale: Scale, modes: CallerModes) -> Tensor:
    """Add the gradients of ``scale * loss(module, shard)`` to those of the module; return the loss.

    Autograd differentiates a CPU graph in the thread that calls it, so replicas do so at the same time.
    """
    with ranges.around("forward"), modes.entered():
        value = loss(module, shard)
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"The loss function returned a {type(value).__name__}; DataParallel.backward needs a tensor.\n"
                "Return the loss itself, a tensor of one element."
            )
    with ranges.around("backward"), modes.entered(device_only=True):  # outside of autocast, as backward should be
        if isinstance(scale, Tensor) and not (scale.dim() == 0 and scale.device.type == "cpu"):  # others need a copy
            scale = scale.to(value.device, non_blocking=True)
        with torch.enable_grad():
            scaled = value * scale
        scaled.backward()
    return value.detach()


def as_listed(device: torch.device) -> int | torch.device:
    """Return ``device`` as torch's class lists it: a GPU as its index."""
    return device if device.type == "cpu" else device.index


def _catch(function: Callable[[], Any], where: str) -> Any:
    """Return what ``function`` returns, or its exception as text and type.

    The exception itself would hold the frames, and with them the activations of the failed step.
    """
    try:
        return function()
    except BaseException:
        return ExceptionWrapper(where=where)
