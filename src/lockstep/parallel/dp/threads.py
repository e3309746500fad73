"""Run the replicas in one persistent thread each: forward for outputs, forward and backward for gradients."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.comm.process import keep_freed_memory
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.capture import Action, Key, Outcome, ReplicaCapture, make_key, make_recorder
from lockstep.parallel.dp.replicas import Replicas, ReplicaState
from lockstep.parallel.dp.scatter_gather import as_listed
from lockstep.telemetry import ranges

# Carry an exception from a replica's thread to the caller: its type, where it happened and its traceback.

Result = TypeVar("Result")


class ReplicaFailure:
    """An exception that a replica raised, as text and type.

    The traceback is kept as text: the object would hold the frames, and with them the activations of the failed step.
    """

    def __init__(self, error: BaseException, where: str) -> None:
        trace = "".join(traceback.format_exception(error))
        self._type = type(error)
        self._args = error.args
        self._attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
        self.message = f"Caught {self._type.__name__} {where}.\nOriginal {trace}"

    def error(self) -> BaseException:
        """Build the exception to raise: an instance of the original type whose text says where it comes from.

        The original constructor is not called, since it may want other arguments than one message; the attributes it
        had set are copied instead. A type that cannot be built this way arrives as a ``RuntimeError``.
        """
        try:
            copy = _bare_copy(self._type, self._args, self._attributes, self.message)
            if str(copy) == self.message:
                return copy
            # OSError and its like compose their text from fields of their own: say ours, keep the fields.
            spoken = type(self._type.__name__, (self._type,), {"__str__": lambda _: self.message})
            return _bare_copy(spoken, self._args, self._attributes, self.message)
        except Exception:
            return RuntimeError(self.message)


class _Verbatim(str):
    """A text that ``repr`` leaves as it is: ``KeyError`` shows the ``repr`` of its argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def attempt(function: Callable[[], Result], where: str) -> Result | ReplicaFailure:
    """Call ``function``; an exception, whichever it is, becomes the result. Its text begins "Caught X ``where``"."""
    try:
        return function()
    except BaseException as error:
        return ReplicaFailure(error, where)


def raise_first(outcomes: list[Any]) -> None:
    """Raise the failure of the replica with the lowest index, if one failed.

    Raises:
        BaseException: Of the type that the replica raised, with the replica, its device and its traceback in the text.
    """
    for outcome in outcomes:
        if isinstance(outcome, ReplicaFailure):
            raise outcome.error() from None


def _bare_copy(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any], message: str
) -> BaseException:
    copy = kind.__new__(kind, *args)
    vars(copy).update(attributes)
    copy.args = (_Verbatim(message) if issubclass(kind, KeyError) else message,)
    return copy


# The state that torch keeps per thread, taken along from the calling thread into the replicas' threads.


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True)
class ReplicaContext:
    """What a replica's thread must enter before it computes; read in the calling thread by ``capture``.

    Grad mode, inference mode and autocast belong to a thread; so do the current CUDA device and its stream. Work on
    the stream that is current in the caller keeps the order that the caller sees; ``streams`` says which replicas have
    another. (The default dtype, deterministic mode and the random generators belong to the process and need nothing.)
    """

    device: torch.device
    grad_enabled: bool
    inference: bool
    autocasts: tuple[_Autocast, ...]
    autocast_cache: bool
    stream: torch.cuda.Stream | None
    home: torch.cuda.Stream | None = None
    """The caller's stream on the first replica's device, if that is another one, for copies from and to there."""

    @classmethod
    def capture(cls, device: torch.device, first: torch.device) -> ReplicaContext:
        """Read the calling thread's state, for a replica on ``device``; that of the first replica is ``first``."""
        device_types = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        return cls(
            device=device,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                _Autocast(kind, torch.get_autocast_dtype(kind))
                for kind in device_types
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
            home=torch.cuda.current_stream(first) if device.type == "cuda" and device != first else None,
        )

    def on_stream(self, stream: torch.cuda.Stream | None) -> ReplicaContext:
        """Return the same context with another stream; None leaves the device and the stream as they are."""
        return replace(self, stream=stream, home=None if stream is None else self.home)

    def for_training(self) -> ReplicaContext:
        """Return the same context with gradients enabled."""
        return replace(self, grad_enabled=True, inference=False)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the device and its stream current in this thread."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.home), torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter everything: device, stream, inference mode, grad mode and autocast."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.on_device())
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for cast in self.autocasts:
                stack.enter_context(
                    torch.autocast(cast.device_type, dtype=cast.dtype, cache_enabled=self.autocast_cache)
                )
            yield


# Which CUDA stream each replica computes on, so that replicas on one device do not wait for each other.


class ReplicaStreams:
    """Streams of replicas: the first on a device has the caller's, others there have one each.

    Own streams begin where the caller's is, and the caller's goes on where they end, so it is to the caller as if all
    had run on its own: memory that goes from one to the other needs no care, and nothing waits for the device.

    Args:
        devices: One a replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._own: dict[int, torch.cuda.Stream] = {}

    @contextmanager
    def contexts(self, num_replicas: int) -> Iterator[list[ReplicaContext]]:
        """Give what the first replicas' threads are to enter; at the end the caller's streams wait for theirs."""
        contexts = [ReplicaContext.capture(device, self._devices[0]) for device in self._devices[:num_replicas]]
        forked: list[tuple[torch.cuda.Stream, torch.cuda.Stream]] = []
        for index, context in enumerate(contexts):
            if context.stream is not None and context.device in self._devices[:index]:
                if index not in self._own:
                    self._own[index] = torch.cuda.Stream(context.device)
                forked.append((self._own[index], context.stream))
                self._own[index].wait_stream(context.stream)
                contexts[index] = context.on_stream(self._own[index])
        try:
            yield contexts
        finally:
            for own, callers in forked:
                callers.wait_stream(own)


# A persistent pool of threads, one for each replica.
#
# A thread is started once and then waits for work, so a step costs no thread start, a thread's number of cores is set
# once, and replica i always runs on thread i (which also keeps what CUDA and autograd hold per thread in place).

_LIVENESS_CHECK_S = 1.0
"""How often a caller that waits for a result looks whether the thread that owes it still lives."""


@dataclass(frozen=True)
class _Job:
    """One call and where its result goes. ``function`` must not raise; ``errors.attempt`` sees to it."""

    index: int
    function: Callable[[], Any]
    results: queue.SimpleQueue[tuple[int, Any]]

    def run(self) -> None:
        self.results.put((self.index, self.function()))


_Tasks = queue.SimpleQueue["_Job | None"]


@dataclass(frozen=True)
class _Worker:
    tasks: _Tasks
    thread: threading.Thread


class ReplicaThreads:
    """Runs one job a thread, all at the same time; the threads end with this object.

    The threads start with the first ``run``, start again in a forked child (a fork takes only the calling thread
    along), and hold no reference to this object, so nothing outlives it.

    Args:
        size: How many threads.
        divide_cores: Give every thread ``torch.get_num_threads() // size`` cores for the inside of its operations.
            Without it each of the ``size`` threads would use all of the cores at once.
    """

    def __init__(self, size: int, *, divide_cores: bool) -> None:
        self._size = size
        self._divide_cores = divide_cores
        self._workers: list[_Worker] = []
        self._owner_pid = 0
        self._cores_divided = 0
        self._finalizer: weakref.finalize[Any, ReplicaThreads] | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call ``functions[i]`` on thread i, all of them at once, and return their results in order.

        Blocks until all are done. An interrupt (Ctrl-C) leaves the unfinished calls to threads that this object no
        longer uses; they end after their call.

        Args:
            functions: At most ``size``, none of which raises.

        Raises:
            LockstepError: A thread died.
        """
        assert len(functions) <= self._size
        if not self._workers or self._owner_pid != os.getpid():
            self._start()
        if self._divide_cores and self._cores_divided != torch.get_num_threads():
            self._set_cores(torch.get_num_threads())
        return self._dispatch(functions)

    def refuse_inside(self) -> None:
        """Raise if called from one of these threads, which would wait for itself.

        Raises:
            LockstepError: It was.
        """
        if any(worker.thread is threading.current_thread() for worker in self._workers):
            raise LockstepError(
                "A DataParallel module was called from inside one of its own replicas.\n"
                "Call the wrapped module there, not the wrapper."
            )

    def stop(self) -> None:
        """End the threads, each after the call it is in. A later ``run`` starts new ones. Does not block."""
        if self._finalizer is not None:
            self._finalizer()
        self._workers = []

    def _start(self) -> None:
        if self._divide_cores:
            keep_freed_memory()
        self._workers = [self._start_worker(index) for index in range(self._size)]
        self._owner_pid = os.getpid()
        self._cores_divided = 0
        self._finalizer = weakref.finalize(self, _stop_all, [worker.tasks for worker in self._workers])

    def _start_worker(self, index: int) -> _Worker:
        tasks: _Tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(tasks,), name=f"lockstep-replica-{index}", daemon=True)
        thread.start()
        return _Worker(tasks, thread)

    def _set_cores(self, total: int) -> None:
        """Divide ``total`` cores among the threads.

        ``torch.set_num_threads`` sets the number of the calling thread and, besides, the number that threads started
        later begin with; calling it here at the end puts the latter back.
        """
        share = max(1, total // self._size)
        try:
            self._dispatch([functools.partial(_use_cores, share)] * self._size)
        finally:
            torch.set_num_threads(total)
        self._cores_divided = total

    def _dispatch(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        try:
            for index, function in enumerate(functions):
                self._workers[index].tasks.put(_Job(index, function, results))
            done: dict[int, Any] = {}
            while len(done) < len(functions):
                try:
                    index, result = results.get(timeout=_LIVENESS_CHECK_S)
                except queue.Empty:
                    self._check_alive(done, len(functions))
                else:
                    done[index] = result
        except BaseException:
            self.stop()
            raise
        return [done[index] for index in range(len(functions))]

    def _check_alive(self, done: dict[int, Any], num_jobs: int) -> None:
        for index in range(num_jobs):
            if index not in done and not self._workers[index].thread.is_alive():
                raise LockstepError(
                    f"The thread of replica {index} died without a result.\n"
                    "This happens when the interpreter is shutting down, or when native code ends the thread."
                )


def _work(tasks: _Tasks) -> None:
    """Run jobs until there is a None. No timeout: an idle thread keeps nobody waiting."""
    while (job := tasks.get()) is not None:
        job.run()
        del job  # it holds inputs and outputs, which must not live until the next job


def _use_cores(count: int) -> None:
    """Set the number of cores of the calling thread.

    torch gives a thread the process's number at the first operation that asks for it, over the thread's own; asking
    for it first gets that behind us.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def _stop_all(queues: list[_Tasks]) -> None:
    for tasks in queues:
        tasks.put(None)


# A replica's part of a step: the loss of its shard and its gradients, as written or recorded.

LossFunction = Callable[[nn.Module, Any], Tensor]
"""Called with a replica and its shard; returns the loss, a tensor of one element."""


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
class ReplicaResult:
    """What came of a replica's part.

    Attributes:
        loss: Detached and not scaled.
        forward_s: Seconds that computing it took.
        backward_s: Seconds that differentiating it took.
        recorded: The gradients, if they are those of a recorded step; else the leaves have them.
    """

    loss: Tensor
    forward_s: float
    backward_s: float
    recorded: list[Tensor | None] | None = None


@dataclass(frozen=True)
class ReplicaStep:
    """A replica's part of a step; its methods run in the replica's thread, `key` in the caller's."""

    loss: LossFunction
    shard: Any
    scale: float | Tensor
    context: ReplicaContext

    def step(self, module: nn.Module) -> ReplicaResult:
        """Run; autograd differentiates a CPU graph in the thread that calls it."""
        start = time.perf_counter()
        with ranges.around("forward"), self.context.for_training().entered():
            value = _checked(self.loss(module, self.shard))
        middle = time.perf_counter()
        with ranges.around("backward"), self.context.on_device():  # outside of autocast, as backward should be
            _scaled(value, self.scale).backward()
        return ReplicaResult(value.detach(), middle - start, time.perf_counter() - middle)

    def key(self, place: object) -> Key:
        """Return the key of this step, of a replica whose tensors are at this place.

        Raises:
            ConfigurationError: It cannot be recorded.
        """
        behaviour = (self.loss, self.context.for_training().on_stream(None), place)
        return make_key(behaviour, self.shard, self.scale, self.context.device)

    def record(
        self, capture: ReplicaCapture, key: Key, module: nn.Module, take: Callable[[], list[Tensor | None]]
    ) -> Exception | None:
        """Record the step, and return what kept it from being recorded."""
        here = self.context.for_training().on_stream(None)  # the recording has a stream of its own

        def work(shard: Any, scale: float | Tensor) -> Outcome:
            with here.entered():
                value = _checked(self.loss(module, shard))
            _scaled(value, scale).backward()
            return Outcome(value.detach(), take())

        try:
            with self.context.on_device():
                capture.record(key, self.shard, self.scale, work)
        except Exception as error:
            return error
        return None

    def replay(self, capture: ReplicaCapture) -> ReplicaResult:
        """Do what was recorded of a step with the same key."""
        start = time.perf_counter()
        with self.context.on_device():
            loss, gradients = capture.replay(self.shard, self.scale)
        return ReplicaResult(loss, time.perf_counter() - start, 0.0, gradients)


def on_device(scale: float | Tensor, device: torch.device) -> float | Tensor:
    """Return ``scale`` on ``device`` if it is a tensor. Does not block."""
    return scale.to(device, non_blocking=True) if isinstance(scale, Tensor) else scale


def differentiate(
    loss: LossFunction, module: nn.Module, shard: Any, scale: float | Tensor
) -> tuple[Tensor, StepTimings]:
    """Do what ``ReplicaEngine.backward`` does with the module itself, in the calling thread."""
    start = time.perf_counter()
    with ranges.around("forward"), torch.enable_grad():
        value = _checked(loss(module, shard))
    middle = time.perf_counter()
    with ranges.around("backward"):
        _scaled(value, scale).backward()
    return value.detach(), StepTimings(0.0, middle - start, time.perf_counter() - middle, 0.0)


def _checked(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"The loss function returned a {type(value).__name__}; DataParallel.backward needs a tensor.\n"
            "Return the loss itself, a tensor of one element."
        )
    return value


def _scaled(value: Tensor, scale: float | Tensor) -> Tensor:
    with torch.enable_grad():
        if isinstance(scale, Tensor) and not (scale.dim() == 0 and scale.device.type == "cpu"):  # that is read here
            scale = scale.to(value.device, non_blocking=True)
        scaled: Tensor = value * scale
    return scaled


# Run replicas in their threads: forward for outputs, forward and backward for gradients.

_TURN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ReplicaGradients:
    """What one replica computed from its shard.

    Attributes:
        loss: Detached and not scaled, on the replica's device.
        gradients: One for each parameter of the module, in their order; None where the replica did not use it.
        module: The replica, with the buffers that its forward left; the wrapped module itself for the first one.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    module: nn.Module


class ReplicaEngine:
    """The replicas of a module and their threads. One call at a time: others wait for their turn.

    Attributes:
        replicas: The replicas.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.replicas = Replicas(module, devices)
        self._streams = ReplicaStreams(devices)
        self._threads = ReplicaThreads(len(devices), divide_cores=devices[0].type == "cpu")
        self._captures = [ReplicaCapture(index, make_recorder(device)) for index, device in enumerate(devices)]
        self._turn = threading.RLock()

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
        with self._streams.contexts(len(modules)) as contexts:
            return self.run(
                [
                    functools.partial(_call, module, arguments, keywords, context)
                    for module, arguments, keywords, context in zip(modules, inputs, kwargs, contexts, strict=True)
                ]
            )

    def backward(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor], *, capture: bool
    ) -> tuple[list[Tensor], StepTimings]:
        """Differentiate the loss of every shard in its replica's thread and sum the gradients into the module's.

        A shard of None is skipped. If a replica fails, the gradients of the module stay as they were.

        Raises:
            BaseException: What the lowest failing replica raised; the text has its traceback.
        """
        results, _, timings = self._differentiate(loss, shards, scales, capture=capture)
        if not results:
            return [], timings
        start = time.perf_counter()
        recorded = {index: result.recorded for index, result in results.items() if result.recorded is not None}
        self.replicas.reduce_gradients(max(results) + 1, self.run, recorded)
        timings = replace(timings, reduce_s=time.perf_counter() - start)
        return [result.loss for result in results.values()], timings

    def gradients(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor]
    ) -> tuple[dict[int, ReplicaGradients], StepTimings]:
        """Differentiate as `backward` does, but leave the replicas' gradients apart, and the module's as they are.

        Returns:
            What each replica with a shard found, by number.
        """
        results, modules, timings = self._differentiate(loss, shards, scales)
        found = {
            index: ReplicaGradients(result.loss, self.replicas.take_gradients(index), modules[index])
            for index, result in results.items()
        }
        return found, timings

    def _differentiate(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor], *, capture: bool = False
    ) -> tuple[dict[int, ReplicaResult], list[nn.Module], StepTimings]:
        """Leave the gradients of the shards in the leaves of their replicas; return the results by replica."""
        num_replicas = max((index + 1 for index, shard in enumerate(shards) if shard is not None), default=0)
        if num_replicas == 0:
            return {}, [], StepTimings(0.0, 0.0, 0.0, 0.0)
        start = time.perf_counter()
        state = self.replicas.prepare(num_replicas, leaves=True, fixed=capture)
        if capture:  # a graph reads the scale on its device
            scales = [on_device(scale, device) for scale, device in zip(scales, self.replicas.devices, strict=False)]
        with self._streams.contexts(num_replicas) as contexts:
            jobs = {
                index: ReplicaStep(loss, shard, scale, context)
                for index, (shard, scale, context) in enumerate(zip(shards, scales, contexts, strict=False))
                if shard is not None
            }
            actions = self._actions(jobs, state) if capture else {}
            # What is replayed needs no modules.
            replays = bool(actions) and all(action is Action.REPLAY for action in actions.values())
            modules = [] if replays else self.replicas.assemble(state)
            refreshed = time.perf_counter()
            try:
                for index in [index for index, action in actions.items() if action is Action.RECORD]:
                    actions[index] = self._record(index, jobs[index], modules[index], state)
                steps: list[Callable[[], ReplicaResult | None]] = [_skip] * num_replicas
                for index, job in jobs.items():
                    if actions.get(index) is Action.REPLAY:
                        steps[index] = functools.partial(job.replay, self._captures[index])
                    else:
                        steps[index] = functools.partial(job.step, modules[index])
                results = {index: result for index, result in enumerate(self.run(steps)) if result is not None}
            except BaseException:
                self.replicas.drop_gradients(num_replicas)
                raise
        timings = StepTimings(
            refresh_s=refreshed - start,
            forward_s=max(result.forward_s for result in results.values()),
            backward_s=max(result.backward_s for result in results.values()),
            reduce_s=0.0,
        )
        return results, modules, timings

    def _actions(self, jobs: Mapping[int, ReplicaStep], state: ReplicaState) -> dict[int, Action]:
        """Return what to do with each replica's step, where recorded steps are wanted."""
        actions = {}
        for index, job in jobs.items():
            try:
                actions[index] = self._captures[index].decide(job.key(state.place(index)))
            except ConfigurationError as error:
                self._captures[index].fail(error)
                actions[index] = Action.RUN
        return actions

    def _record(self, index: int, job: ReplicaStep, module: nn.Module, state: ReplicaState) -> Action:
        """Record the step of a replica in its thread, while no other computes; return what is to be done with it."""
        capture, take = self._captures[index], functools.partial(self.replicas.take_all_gradients, index)
        key = job.key(state.place(index))
        jobs: list[Callable[[], Exception | None]] = [_skip] * len(state.weights)
        jobs[index] = functools.partial(job.record, capture, key, module, take)
        error = self.run(jobs)[index]
        if error is None:
            return Action.REPLAY
        capture.fail(error)
        take()
        return Action.RUN

    def run_on_devices(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do as `run` does, with each replica's device and its stream there made current."""
        with self._streams.contexts(len(functions)) as contexts:
            return self.run([functools.partial(_on_device, *pair) for pair in zip(functions, contexts, strict=True)])

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function a replica, a single one in the calling thread; raise the first failure."""
        jobs = [
            functools.partial(attempt, function, f"in replica {index} on device {as_listed(device)}")
            for index, (function, device) in enumerate(zip(functions, self.replicas.devices, strict=False))
        ]
        try:
            outcomes = self._threads.run(jobs) if len(jobs) > 1 else [job() for job in jobs]
        except BaseException:  # Ctrl-C: the jobs run on, with these replicas
            self.replicas.forget()
            raise
        raise_first(outcomes)
        return outcomes


def _on_device(function: Callable[[], Any], context: ReplicaContext) -> Any:
    with context.on_device():
        return function()


def _call(module: nn.Module, inputs: Any, kwargs: dict[str, Any], context: ReplicaContext) -> Any:
    arguments = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    with context.entered():
        return module(*arguments, **kwargs)


def _skip() -> None:
    return None
