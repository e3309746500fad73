"""Run replicas in their threads: forward for outputs, forward and backward for gradients."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.context import ReplicaContext
from lockstep.parallel.dp.devices import as_listed
from lockstep.parallel.dp.errors import attempt, raise_first
from lockstep.parallel.dp.replicas import Replicas
from lockstep.parallel.dp.streams import ReplicaStreams
from lockstep.parallel.dp.threads import ReplicaThreads

LossFunction = Callable[[nn.Module, Any], Tensor]
"""Called with a replica and its shard; returns the loss, a tensor of one element."""

_TURN_TIMEOUT_S = 600.0


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
class _ReplicaResult:
    loss: Tensor
    forward_s: float
    backward_s: float


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
                    functools.partial(_forward, module, arguments, keywords, context)
                    for module, arguments, keywords, context in zip(modules, inputs, kwargs, contexts, strict=True)
                ]
            )

    def backward(
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor]
    ) -> tuple[list[Tensor], StepTimings]:
        """Differentiate the loss of every shard in its replica's thread and sum the gradients into the module's.

        A shard of None is skipped. If a replica fails, the gradients of the module stay as they were.

        Raises:
            BaseException: What the lowest failing replica raised; the text has its traceback.
        """
        results, _, timings = self._differentiate(loss, shards, scales)
        if not results:
            return [], timings
        start = time.perf_counter()
        self.replicas.reduce_gradients(max(results) + 1, self.run)
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
        self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[float | Tensor]
    ) -> tuple[dict[int, _ReplicaResult], list[nn.Module], StepTimings]:
        """Leave the gradients of the shards in the leaves of their replicas; return the results by replica."""
        num_replicas = max((index + 1 for index, shard in enumerate(shards) if shard is not None), default=0)
        if num_replicas == 0:
            return {}, [], StepTimings(0.0, 0.0, 0.0, 0.0)
        start = time.perf_counter()
        modules = self.replicas.refresh(num_replicas, leaves=True)
        refreshed = time.perf_counter()
        with self._streams.contexts(num_replicas) as contexts:
            steps: list[Callable[[], _ReplicaResult | None]] = [
                _skip if shard is None else functools.partial(_step, loss, module, shard, scale, context)
                for module, shard, scale, context in zip(modules, shards, scales, contexts, strict=False)
            ]
            try:
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


def differentiate(
    loss: LossFunction, module: nn.Module, shard: Any, scale: float | Tensor
) -> tuple[Tensor, StepTimings]:
    """Do what ``ReplicaEngine.backward`` does with the module itself, in the calling thread."""
    start = time.perf_counter()
    with torch.enable_grad():
        value = _checked(loss(module, shard))
    middle = time.perf_counter()
    _scaled(value, scale).backward()
    return value.detach(), StepTimings(0.0, middle - start, time.perf_counter() - middle, 0.0)


def _on_device(function: Callable[[], Any], context: ReplicaContext) -> Any:
    with context.on_device():
        return function()


def _forward(module: nn.Module, inputs: Any, kwargs: dict[str, Any], context: ReplicaContext) -> Any:
    arguments = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    with context.entered():
        return module(*arguments, **kwargs)


def _step(
    loss: LossFunction, module: nn.Module, shard: Any, scale: float | Tensor, context: ReplicaContext
) -> _ReplicaResult:
    """Run in the replica's thread; autograd differentiates a CPU graph in the thread that calls it."""
    start = time.perf_counter()
    with context.for_training().entered():
        value = _checked(loss(module, shard))
    middle = time.perf_counter()
    with context.on_device():  # outside of autocast, as backward should be
        _scaled(value, scale).backward()
    return _ReplicaResult(value.detach(), middle - start, time.perf_counter() - middle)


def _skip() -> None:
    return None


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
