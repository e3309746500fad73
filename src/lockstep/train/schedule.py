"""The learning rate as a function of the optimizer step: scaling with the batch, warm-up, decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from lockstep.train.settings import Scaling, Schedule


@dataclass(frozen=True)
class LearningRate:
    """The factor on the optimizer's own learning rates at each optimizer step.

    Args:
        scale: From the size of the global batch; see `batch_scale`.
        warmup: Steps over which the factor rises from ``1 / warmup`` of its value to all of it.
        num_steps: Steps of the run, over which it falls.
        decay: How it falls, or a function ``(step, num_steps)`` to the factor.
    """

    scale: float
    warmup: int
    num_steps: int
    decay: Schedule | Callable[[int, int], float]

    def factor(self, step: int) -> float:
        """Return the factor at optimizer step ``step``, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.scale * warm * self._fall(step)

    def _fall(self, step: int) -> float:
        if callable(self.decay):
            return self.decay(step, self.num_steps)
        if self.decay == "constant" or step < self.warmup:
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.num_steps - self.warmup))
        return 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def batch_scale(rule: Scaling, batch_size: int, base_batch_size: int) -> float:
    """Return the factor on the learning rate for a global batch that differs from the base batch.

    Source: linear from Goyal et al. 2017 (arXiv:1706.02677), square root from Krizhevsky 2014 (arXiv:1404.5997).
    """
    ratio = batch_size / base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def base_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates that the optimizer was made with, by group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, base: list[float], factor: float) -> None:
    """Set each group's learning rate to its base rate times ``factor``; one that is a tensor stays one."""
    for group, rate in zip(optimizer.param_groups, base, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor
