"""Run replicas in their threads: forward for outputs, forward and backward for gradients."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.capture import Action, ReplicaCapture, make_recorder
from lockstep.parallel.dp.context import ReplicaContext
from lockstep.parallel.dp.devices import as_listed
from lockstep.parallel.dp.errors import attempt, raise_first
from lockstep.parallel.dp.job import Job, LossFunction, ReplicaResult, StepTimings, on_device
from lockstep.parallel.dp.replicas import Replicas, ReplicaState
from lockstep.parallel.dp.streams import ReplicaStreams
from lockstep.parallel.dp.threads import ReplicaThreads

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
                    functools.partial(_forward, module, arguments, keywords, context)
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
                index: Job(loss, shard, scale, context)
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

    def _actions(self, jobs: Mapping[int, Job], state: ReplicaState) -> dict[int, Action]:
        """Return what to do with each replica's step, where recorded steps are wanted."""
        actions = {}
        for index, job in jobs.items():
            try:
                actions[index] = self._captures[index].decide(job.key(state.place(index)))
            except ConfigurationError as error:
                self._captures[index].fail(error)
                actions[index] = Action.RUN
        return actions

    def _record(self, index: int, job: Job, module: nn.Module, state: ReplicaState) -> Action:
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


def _forward(module: nn.Module, inputs: Any, kwargs: dict[str, Any], context: ReplicaContext) -> Any:
    arguments = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    with context.entered():
        return module(*arguments, **kwargs)


def _skip() -> None:
    return None
