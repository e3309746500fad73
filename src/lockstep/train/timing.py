"""The result of a step of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.accelerator import synchronize
from lockstep.telemetry.step_times import StepTimes
from lockstep.telemetry.timer import StepTimer


@dataclass(frozen=True)
class StepRecord:
    """The result of a step. Only reading a number waits for the device.

    Args:
        step: Counted from 0 over all epochs.
        num_samples: Number of samples of the global batch.
        loss: Mean over the global batch, a 0-dimensional tensor.
        grad_norm: Global norm of the gradient before clipping, if it was needed.
        updated: Whether the optimizer made a step; False after an overflow in fp16, and without synchronisation.
        count: Number of items, such as tokens, that the loss is a mean over, a 0-dimensional tensor; None: samples.
        timer: The time by phase.
    """

    step: int
    num_samples: int
    loss: Tensor
    grad_norm: Tensor | None
    updated: bool
    count: Tensor | None
    timer: StepTimer = field(repr=False)

    @property
    def times(self) -> StepTimes:
        """The times of the step on this rank. Blocks on a device until its last phase is over."""
        if isinstance(self.timer.marks.end, torch.Event):
            synchronize(self.timer.marks.end)
        return self.timer.marks.times()
