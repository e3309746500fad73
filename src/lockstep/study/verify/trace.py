"""What is written down of a run: everything that two runs must have in common to be the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.study.verify.sketch import Sketch, sketch


@dataclass(frozen=True)
class Tensors:
    """Parameters, gradients and buffers by name; a parameter without a gradient has none here either."""

    parameters: dict[str, Sketch]
    gradients: dict[str, Sketch]
    buffers: dict[str, Sketch]


@dataclass(frozen=True)
class StepTrace:
    """One step of one process.

    Attributes:
        step: Counted from 0 over all epochs.
        samples: A digest of each sample that this process loaded, in order.
        loss: Of the global batch.
        rates: Learning rates and the other numbers of the optimizer's groups, that the update used.
        tensors: After the step; the gradients are those that the optimizer got.
        batches: A digest of each batch that the loss got, as it was collated.
    """

    step: int
    samples: tuple[bytes, ...]
    loss: float
    rates: dict[str, float]
    tensors: Tensors
    batches: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A run as one process saw it.

    Attributes:
        sizes: Numbers that the whole run hangs on: samples of the data set and of a global batch.
        initial: Before the first step.
        is_stream: Whether every process reads all samples.
        draws: Names of the random operations that forward used; known only where they were watched.
    """

    sizes: dict[str, int | None]
    initial: Tensors
    steps: tuple[StepTrace, ...]
    is_stream: bool = False
    draws: tuple[str, ...] = ()


def take(model: nn.Module) -> Tensors:
    """Return what there is of a model now."""
    with torch.no_grad():
        return Tensors(
            {name: sketch(value) for name, value in model.named_parameters()},
            {name: sketch(value.grad) for name, value in model.named_parameters() if value.grad is not None},
            {name: sketch(value) for name, value in model.named_buffers()},
        )


def read_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return every number of the optimizer's groups by name, the learning rates first."""
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        names = sorted((name for name in group if name not in ("params", "initial_lr")), key=lambda name: name != "lr")
        for name in names:
            for part, value in _numbers(group[name]):
                found[f"{name}{part} of group {index}"] = value
    return found


def _numbers(value: object) -> list[tuple[str, float]]:
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", float(item)) for index, item in enumerate(value) if isinstance(item, (int, float))]
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        return []
    return [("", float(value))] if not isinstance(value, torch.Tensor) or value.numel() == 1 else []
