"""A replica's part of a step: the loss of its shard and its gradients, as written or recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.capture import Key, Outcome, ReplicaCapture, make_key
from lockstep.parallel.dp.context import ReplicaContext
from lockstep.telemetry import ranges

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
class Job:
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
