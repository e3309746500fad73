"""`Watch`: what a script that is recorded is given to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.observe.observation import Observation
from lockstep.observe.step import Value

Batch = TypeVar("Batch")

_MOST_LOSSES = 1024
"""Values a step that are averaged."""


class Watch:
    """The record of a training loop; made by `lockstep.monitor`.

    A context manager: leaving the block ends the record. Otherwise it ends with the process.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    @property
    def run_dir(self) -> Path:
        """The folder with the record, for ``lockstep report``."""
        return self._observation.run_dir

    @property
    def num_steps(self) -> int:
        """Steps done, those that GradScaler left out included."""
        return self._observation.steps.num_done

    def loss(self, value: Tensor | float) -> None:
        """Record a loss of the current step, or of the one that is just over; of several the mean is taken.

        Does not block: a tensor on a CUDA device is copied when the device gets there.

        Args:
            value: A number, or a tensor with one element.

        Raises:
            ConfigurationError: It has more than one.
        """
        found, step = _value_of(value), self._observation.steps.current
        if step is not None and not self._observation.is_closed and len(step.losses) < _MOST_LOSSES:
            step.losses.append(found)

    def grad_norm(self, value: Tensor | float) -> None:
        """Record the norm of the gradient of the current step, such as ``clip_grad_norm_`` returns. Does not block.

        Args:
            value: A number, or a tensor with one element.

        Raises:
            ConfigurationError: It has more than one.
        """
        found, step = _value_of(value), self._observation.steps.current
        if step is not None and not self._observation.is_closed:
            step.grad_norm = found

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield what ``batches`` yields, for loops over something else than a DataLoader, whose waiting is seen so."""
        return self._observation.batches.iterated(batches)

    def finish(self) -> None:
        """End the record in order, and compare the clocks of the ranks' machines once more.

        Collective: every rank. Blocks for some small messages, and as `close` does.
        """
        self._observation.finish()

    def close(self) -> None:
        """End the record; again has no effect. Blocks until the device is done, and some seconds at most for the disk.

        Unlike `finish`, ranks may call this at any time, or not at all: then it happens when the process ends.
        """
        self._observation.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observation.close(error)


def _value_of(value: Tensor | float) -> Value:
    if not isinstance(value, Tensor):
        return Value(float(value))
    if value.numel() != 1:
        raise ConfigurationError(
            f"What was given to be recorded has {value.numel()} elements.\nGive one number, such as the mean."
        )
    if value.device.type == "cpu":
        return Value(float(value.item()))
    value = value.detach()
    if not value.is_cuda:
        return Value(value.clone())  # the script may change it
    there = torch.empty((), dtype=torch.float64, pin_memory=True)
    there.copy_(value.double().reshape(()), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(value.device))
    return Value(there, arrived)
