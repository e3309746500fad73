"""A step of somebody else's loop, as it was seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from lockstep.parallel.ddp.bucket_stamps import StepStamps
from lockstep.train.stopwatch import Mark, seconds_between

Phase = Literal["data_wait", "forward", "backward", "optimizer"]


Span = tuple[Phase, Mark, Mark, float]
"""What a step did from one mark to another, and what of it the host spent in collectives of ours that block it."""


@dataclass(slots=True)
class Value:
    """A number of the step that the script has given: here already, or on its way from the device."""

    number: float | torch.Tensor
    arrived: torch.cuda.Event | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is here."""
        return self.arrived is None or self.arrived.query()


@dataclass(slots=True)
class Step:
    """A step, from its first batch to the end of its update.

    Attributes:
        number: Counted from 0.
        begin: The first mark.
        began_at: When the host got there, by ``time.perf_counter``.
        wall_s: The same in Unix time.
        end: The last mark.
        spans: What was seen of it, in order; the rest is the script's own.
        waits: Within backward: from when this rank's own work was done, to when the gradients were reduced.
        stamps: The same and more, from an engine of ours, for each backward that it has synchronised.
        samples: Of this rank.
        num_inputs: What forwards were given, for a script without a loader that is seen.
        interval_s: From its beginning to that of the next, or to what came between.
        hidden_s: Time in which buckets travelled beside backward, where torch's engine tells it.
        owes_hidden: Whether it may tell that in the next forward.
        losses, grad_norm: What the script has given.
        learning_rate: Of the first parameter group.
        sees_batches: Whether batches come from loaders that are seen.
        has_forward, has_backward: Whether they were seen.
        is_skipped: Whether the gradient was not finite, and so there was no update.
    """

    number: int
    begin: Mark
    began_at: float
    wall_s: float
    end: Mark
    spans: list[Span] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    stamps: list[StepStamps] = field(default_factory=list)
    samples: int = 0
    num_inputs: int = 0
    interval_s: float | None = None
    hidden_s: float | None = None
    owes_hidden: bool = False
    losses: list[Value] = field(default_factory=list)
    grad_norm: Value | None = None
    learning_rate: float | None = None
    sees_batches: bool = False
    has_forward: bool = False
    has_backward: bool = False
    is_skipped: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the device has come to the end of all that is to be read."""
        values = self.losses if self.grad_norm is None else [*self.losses, self.grad_norm]
        over = not isinstance(self.end, torch.cuda.Event) or self.end.query()
        return over and not self.owes_hidden and all(value.is_known for value in values)

    def seconds(self, phases: Sequence[Phase]) -> float:
        """Return how long some phases took together, without waiting in collectives of ours."""
        return sum(seconds_between(begin, end) - waited for phase, begin, end, waited in self.spans if phase in phases)


class Listener(Protocol):
    """Takes the steps."""

    def opened(self, step: Step) -> None:
        """Take notice that a step has begun."""

    def forward_ended(self) -> None:
        """Take notice that a training forward is over."""

    def done(self, step: Step) -> None:
        """Take a step; nothing is added to it any more, but the device may still owe its figures."""

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Take notice of an evaluation: when it began, and how long training stood still for it."""
