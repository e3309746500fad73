"""What is known of a step afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.train.stopwatch import PhaseTimes, Stopwatch


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. Reading a number waits for the device to get there; nothing else does.

    Args:
        step: Counted from 0 over all epochs.
        num_samples: Samples of the global batch.
        loss: Mean over the global batch, a 0-dimensional tensor.
        grad_norm: Global norm of the gradient before clipping, if it was needed.
        updated: Whether the optimizer was stepped; not after an overflow in fp16, nor without synchronisation.
        count: What the loss is a mean over if that is not samples, such as tokens; a 0-dimensional tensor.
    """

    step: int
    num_samples: int
    loss: Tensor
    grad_norm: Tensor | None
    updated: bool
    _watch: Stopwatch = field(repr=False)
    count: Tensor | None = None

    @property
    def times(self) -> PhaseTimes:
        """Seconds of the step on this rank, by what they went into."""
        return self._watch.read()

    @property
    def waited(self) -> PhaseTimes:
        """Seconds of those in which the host waited for other ranks, outside of the reduction of gradients."""
        return self._watch.read_waited()

    @property
    def watch(self) -> Stopwatch:
        """The laps of the step, for whoever wants to know when each was."""
        return self._watch

    @property
    def total_s(self) -> float:
        """Seconds of the whole step on this rank."""
        return self.times.total_s
