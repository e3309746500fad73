"""Run the replicas in one persistent thread each: forward for outputs, forward and backward for gradients."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper

from lockstep.comm.process import keep_freed_memory
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.gradients import Gradients
from lockstep.parallel.dp.replicas import Replicas
from lockstep.telemetry import ranges

LossFunction = Callable[[nn.Module, Any], Tensor]
"""Called with a replica and its shard; returns the loss, a tensor of one element."""

_TURN_TIMEOUT_S = 600.0

_SIGNAL_CHECK_S = 0.5

_Tasks = queue.SimpleQueue["Callable[[], None] | None"]


class ReplicaThreads:
    """Runs one function on each thread, all at the same time; the threads end with this object.

    A thread is started once and then waits for work. So a step costs no thread start, and replica i always runs on
    thread i, which keeps what CUDA and autograd hold for each thread in place. The threads hold no reference to this
    object. They are started again in a forked child, since a fork takes only the calling thread along.

    Args:
        size: How many threads.
        divide_cores: Give every thread ``torch.get_num_threads() // size`` cores for the inside of its operations.
            Without it each of the ``size`` threads would use all of the cores at once.
    """

    def __init__(self, size: int, *, divide_cores: bool) -> None:
        self._size, self._divide_cores = size, divide_cores
        self._threads: list[threading.Thread] = []
        self._tasks: list[_Tasks] = []
        self._stop: Callable[[], object] = lambda: None
        self._started_with: tuple[int, int] | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call ``functions[i]`` on thread i, all of them at once, and return their results in order.

        Blocks until all are done, however long they take. An interrupt (Ctrl-C) leaves the unfinished calls to threads
        that this object no longer uses; they end after their call.

        Args:
            functions: At most ``size``, none of which raises.
        """
        # The process may have been forked, or may have been given another number of cores.
        if self._started_with != (os.getpid(), torch.get_num_threads()):
            self._start()
        results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        try:
            for index, function in enumerate(functions):
                self._tasks[index].put(partial(_put_result, function, index, results))
            done: dict[int, Any] = {}
            while len(done) < len(functions):
                # A signal that comes just before the wait begins is handled when it ends: so no wait is long.
                with suppress(queue.Empty):
                    index, result = results.get(timeout=_SIGNAL_CHECK_S)
                    done[index] = result
        except BaseException:
            self._stop()
            self._started_with = None
            raise
        return [done[index] for index in range(len(functions))]

    def refuse_inside(self) -> None:
        """Raise if called from one of these threads, which would wait for itself.

        Raises:
            LockstepError: It was.
        """
        if threading.current_thread() in self._threads:
            raise LockstepError(
                "A DataParallel module was called from inside one of its own replicas.\n"
                "Call the wrapped module there, not the wrapper."
            )

    def _start(self) -> None:
        if self._started_with is not None and self._started_with[0] == os.getpid():
            self._stop()  # of a parent process there are no threads here
        total = torch.get_num_threads()
        if self._divide_cores:
            keep_freed_memory()
        share = max(1, total // self._size) if self._divide_cores else None
        self._tasks = [queue.SimpleQueue() for _ in range(self._size)]
        ready = threading.Barrier(self._size + 1)
        self._threads = [
            # daemons, so that a replica that hangs does not keep an interrupted process from ending
            threading.Thread(target=_work, args=(tasks, share, ready), name=f"lockstep-replica-{index}", daemon=True)
            for index, tasks in enumerate(self._tasks)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait(_TURN_TIMEOUT_S)
        if self._divide_cores:
            # set_num_threads() sets the number of the calling thread, and also the one that threads started later
            # begin with: put the latter back.
            torch.set_num_threads(total)
        self._started_with = (os.getpid(), total)
        self._stop = weakref.finalize(self, _stop_all, self._tasks)


def _work(tasks: _Tasks, num_cores: int | None, ready: threading.Barrier) -> None:
    if num_cores is not None:
        # torch gives a thread the process's number at the first operation that asks for it, over the thread's own:
        # ask first.
        torch.get_num_threads()
        torch.set_num_threads(num_cores)
    ready.wait(_TURN_TIMEOUT_S)
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds inputs and outputs, which must not live until the next one


def _put_result(function: Callable[[], Any], index: int, results: queue.SimpleQueue[tuple[int, Any]]) -> None:
    results.put((index, function()))


def _stop_all(queues: Sequence[_Tasks]) -> None:
    for tasks in queues:
        tasks.put(None)


@dataclass(frozen=True)
class ReplicaContext:
    """The state that torch keeps for each thread, taken along from the calling thread into a replica's thread.

    Grad mode, inference mode and autocast belong to a thread; so do the current CUDA device and its stream. Work on
    the stream that is current in the caller keeps the order that the caller sees. (The default dtype, deterministic
    mode and the random generators belong to the process and need nothing.)
    """

    device: torch.device
    grad_enabled: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    stream: torch.cuda.Stream | None

    @classmethod
    def of_caller(cls, device: torch.device) -> ReplicaContext:
        """Return the calling thread's state, for a replica on ``device``."""
        return cls(
            device=device,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys(("cpu", device.type))
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
        )

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the device and its stream current in this thread."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter everything: device, stream, inference mode, grad mode and autocast."""
        with self.on_device(), ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


@dataclass(frozen=True)
class StepTimings:
    """Where the time of one ``backward`` went: seconds on the host's clock, which CUDA work may outlast.

    Attributes:
        refresh_s: Bringing the replicas up to date.
        forward_s: Computing the losses, in the slowest replica.
        backward_s: Differentiating them, in the slowest replica.
        reduce_s: Summing the gradients.
    """

    refresh_s: float
    forward_s: float
    backward_s: float
    reduce_s: float


@dataclass(frozen=True)
class ReplicaGradients:
    """What one replica computed from its shard.

    Attributes:
        loss: Detached and not scaled, on the replica's device.
        gradients: One for each parameter of the module, in their order; None where the replica did not use it.
        module: The replica, with the buffers that its forward left; the wrapped module itself for the first one.
    """

    loss: Tensor
    gradients: Gradients
    module: nn.Module


class ReplicaEngine:
    """The replicas of a module and their threads. One call at a time: others wait for their turn.

    Attributes:
        replicas: The replicas.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.replicas = Replicas(module, devices)
        self._threads = ReplicaThreads(len(devices), divide_cores=devices[0].type == "cpu")
        self._turn = threading.RLock()  # forward holds it around replicate() and parallel_apply(), which take it, too

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads from using the replicas.

        Raises:
            LockstepError: Called inside a replica, or another thread has not ended its turn for ten minutes.
        """
        self._threads.refuse_inside()
        if not self._turn.acquire(timeout=_TURN_TIMEOUT_S):
            raise LockstepError(
                f"Another thread has been using this DataParallel module for {_TURN_TIMEOUT_S:.0f} s.\n"
                "Give each thread a wrapper of its own, or find out what the other one waits for."
            )
        try:
            yield
        finally:
            self._turn.release()

    def apply(self, modules: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> list[Any]:
        """Call ``modules[i](*inputs[i], **kwargs[i])`` in thread i under the caller's modes, and return the outputs.

        Raises:
            BaseException: What the lowest failing replica raised; the text has its traceback.
        """
        if not len(modules) == len(inputs) == len(kwargs):
            raise ConfigurationError(
                f"parallel_apply got {len(modules)} replicas, {len(inputs)} inputs and {len(kwargs)} keyword arguments"
                "\nAn overridden scatter must return as many inputs as keyword arguments."
            )

        def call(module: nn.Module, arguments: Any, keywords: dict[str, Any], context: ReplicaContext) -> Any:
            positional = arguments if isinstance(arguments, (tuple, list)) else (arguments,)
            with context.entered():
                return module(*positional, **keywords)

        contexts = map(ReplicaContext.of_caller, self.replicas.devices)
        return self._run([partial(call, *each) for each in zip(modules, inputs, kwargs, contexts, strict=False)])

    def backward(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor]
    ) -> tuple[list[Tensor], StepTimings]:
        """Differentiate the loss of every shard in its replica's thread and sum the gradients into the module's.

        A shard of None is skipped. If a replica fails, the gradients of the module stay as they were.

        Raises:
            BaseException: What the lowest failing replica raised; the text has its traceback.
        """
        losses, _, timings = self._differentiate(loss, shards, scales)
        start = time.perf_counter()
        if losses:
            self.replicas.reduce_gradients()
        return list(losses.values()), replace(timings, reduce_s=time.perf_counter() - start)

    def gradients(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor]
    ) -> tuple[dict[int, ReplicaGradients], StepTimings]:
        """Differentiate as `backward` does, but leave the replicas' gradients apart, and the module's as they are.

        Returns:
            What each replica with a shard computed, by number.
        """
        losses, modules, timings = self._differentiate(loss, shards, scales)
        rows = self.replicas.take_gradients() if losses else []
        count = self.replicas.num_parameters
        return {
            index: ReplicaGradients(value, rows[index][:count], modules[index]) for index, value in losses.items()
        }, timings

    def _differentiate(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor]
    ) -> tuple[dict[int, Tensor], list[nn.Module], StepTimings]:
        """Leave the gradients of the shards in the leaves of their replicas; return the losses by replica."""
        num_replicas = max((index + 1 for index, shard in enumerate(shards) if shard is not None), default=0)
        if num_replicas == 0:
            return {}, [], StepTimings(0.0, 0.0, 0.0, 0.0)
        start = time.perf_counter()
        modules = self.replicas.refresh(num_replicas, leaves=True)
        refresh_s = time.perf_counter() - start
        steps = [
            partial(differentiate, loss, module, shard, scale, ReplicaContext.of_caller(device))
            if shard is not None
            else _skip
            for module, shard, scale, device in zip(modules, shards, scales, self.replicas.devices, strict=False)
        ]
        try:
            results = {index: result for index, result in enumerate(self._run(steps)) if result is not None}
        except BaseException:
            self.replicas.drop_gradients()  # those of the replicas that did not fail
            raise
        timings = StepTimings(
            refresh_s=refresh_s,
            forward_s=max(each.forward_s for _, each in results.values()),
            backward_s=max(each.backward_s for _, each in results.values()),
            reduce_s=0.0,
        )
        return {index: value for index, (value, _) in results.items()}, modules, timings

    def _run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function for each replica, a single one in the calling thread; raise the first failure."""
        guarded = [
            partial(_catch, function, f"in replica {index} on device {as_listed(device)}")
            for index, (function, device) in enumerate(zip(functions, self.replicas.devices, strict=False))
        ]
        try:
            # One replica alone has nothing to run beside; in the calling thread it has all the cores.
            outcomes = self._threads.run(guarded) if len(guarded) > 1 else [function() for function in guarded]
        except BaseException:  # Ctrl-C: the calls run on, with these replicas
            self.replicas.forget()
            raise
        # The lowest failing replica, not the first in time: the same error in every run.
        for outcome in outcomes:
            if isinstance(outcome, ExceptionWrapper):
                outcome.reraise()
        return outcomes


def differentiate(
    loss: LossFunction, module: nn.Module, shard: Any, scale: float | Tensor, context: ReplicaContext
) -> tuple[Tensor, StepTimings]:
    """Add the gradients of ``scale * loss(module, shard)`` to those of the module; return the loss and the times.

    Autograd differentiates a CPU graph in the thread that calls it, so replicas do so at the same time.
    """
    start = time.perf_counter()
    with ranges.around("forward"), replace(context, grad_enabled=True, inference=False).entered():
        value = loss(module, shard)
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"The loss function returned a {type(value).__name__}; DataParallel.backward needs a tensor.\n"
                "Return the loss itself, a tensor of one element."
            )
    middle = time.perf_counter()
    with ranges.around("backward"), context.on_device():  # outside of autocast, as backward should be
        if isinstance(scale, Tensor) and not (scale.dim() == 0 and scale.device.type == "cpu"):  # that is read here
            scale = scale.to(value.device, non_blocking=True)
        with torch.enable_grad():
            scaled = value * scale
        scaled.backward()
    return value.detach(), StepTimings(0.0, middle - start, time.perf_counter() - middle, 0.0)


def as_listed(device: torch.device) -> int | torch.device:
    """Return ``device`` as torch's class lists it: a GPU as its index."""
    return device.index if device.type == "cuda" else device


def _catch(function: Callable[[], Any], where: str) -> Any:
    """Return what ``function`` returns, or its exception as text and type.

    The exception itself would hold the frames, and with them the activations of the failed step.
    """
    try:
        return function()
    except BaseException:
        return ExceptionWrapper(where=where)


def _skip() -> None:
    return None
