"""Puts together the steps of a loop from what hooks see of it: batches, forwards, backwards, optimizer steps.

[Note: what a step is]
A step ends when the *lead* optimizer has stepped: the first that steps, or another when that one does not any more.
Optimizers that step right behind it belong to the same step. It begins with the first batch, or else the first
training forward, since the step before. Between the two lies what the script does besides: that belongs to no step.

[Note: training or not]
A forward trains if gradients are recorded and the model is in training mode. A model that is trained in evaluation
mode is found out by its first backward. Forwards that do not train, between two steps, are an evaluation: the
batches that went into them belong to no step, and training stands still until the next one. Within a step they are
part of it, and so is a single one on a batch that is then trained on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import get_ident
from typing import Protocol

import torch

from lockstep import activity
from lockstep.accelerator import is_capturing, mark_on
from lockstep.telemetry.run_record import Mark, RecordedStep, Reduction


@dataclass(slots=True)
class Step(RecordedStep):
    """A step of somebody else's loop, from its first batch to the end of its update, as it was seen from outside.

    Attributes:
        waits: Within backward: from when this rank's own work was done, to when the gradients were reduced.
        num_inputs: What forwards were given, for a script without a loader that is seen.
        sees_batches: Whether batches come from loaders that are seen.
        has_forward, has_backward: Whether they were seen.
    """

    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    num_inputs: int = 0
    sees_batches: bool = False
    has_forward: bool = False
    has_backward: bool = False


class Listener(Protocol):
    """Takes the steps."""

    def opened(self, step: Step) -> None:
        """Take a step that has just begun."""

    def done(self, step: Step) -> None:
        """Take a step; nothing is added to it any more, but the device may still owe its figures."""

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Take an evaluation: when it began, and how long training stood still for it."""


# Waits for batches that are kept until a forward shows what they were for.
_MOST_BATCHES = 256

# After so many steps of others without one of its own, an optimizer is not the lead any more.
_SILENT = 8


class _Now(Enum):
    OUTSIDE = "what the script does besides"
    FORWARD = "forward"
    LOSS = "between a forward and its backward"
    BACKWARD = "backward"
    OPTIMIZER = "an optimizer's step"


# A mark, when the host came to it, and how long it had been in collectives of ours by then; tuples are quick.
Moment = tuple[Mark, float, float]


class Steps:
    """Takes what hooks see, in the thread that trains or while that waits for its backward.

    Args:
        device: On which the model computes.
        listener: Gets the steps.
        first_step: Number of the first.

    Attributes:
        num_done: Steps done.
        is_over: Whether hooks are to report nothing any more.
    """

    def __init__(self, device: torch.device, listener: Listener, first_step: int = 0) -> None:
        self._device, self._listener = device, listener
        self.num_done = first_step
        self.sees_batches = self.is_over = False
        self._thread = get_ident()
        self._now = _Now.OUTSIDE
        self._since: Moment | None = None
        self._own_done: Mark | None = None
        self._open: Step | None = None
        self._done: Step | None = None
        # Batches, and the samples in them, since the last step: those of the next one, or of an evaluation.
        self._batches: list[tuple[Moment, Moment]] = []
        self._unclaimed = 0
        self._trains_in_eval = False
        self._evaluation: tuple[float, float] | None = None
        self._borrowed: tuple[list[tuple[Moment, Moment]], int] | None = None
        self._lead: int | None = None
        self._num_silent = self._depth = 0
        self._has_stepped_within = False

    # --- what is asked ----------------------------------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """Whether hooks report."""
        # No event can be recorded while a CUDA graph is captured.
        return not self.is_over and not is_capturing(self._device)

    @property
    def is_mine(self) -> bool:
        """Whether hooks report, and this is the thread that trains."""
        return get_ident() == self._thread and self.is_watching

    @property
    def in_forward(self) -> bool:
        """Whether a training forward runs."""
        return self._now is _Now.FORWARD

    @property
    def current(self) -> Step | None:
        """The step to which a loss belongs that the script gives now: the open one, or else the last."""
        return self._open if self._open is not None else self._done

    @property
    def lacks_samples(self) -> bool:
        """Whether no loader has shown how many samples the step has."""
        return self._open is not None and not self._open.samples

    def trains(self, *, has_grad: bool, is_training: bool) -> bool:
        """Return whether a forward trains; see [Note: training or not]."""
        return has_grad and (is_training or self._trains_in_eval)

    def moment(self) -> Moment:
        """Return the present moment."""
        at = time.perf_counter()
        # On CPU the moment of the host is the mark as well: one reading of the clock instead of two.
        return (at if self._device.type == "cpu" else mark_on(self._device)), at, activity.now.waited_s

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch(self, asked: Moment, num_samples: int | None) -> None:
        """Take a batch that was asked for, and has come by now; no samples if a loader was only started."""
        came = self.moment()
        self._depth = 0
        self.sees_batches = True
        self._unclaimed += num_samples or 0
        if self._open is None:
            self._batches.append((asked, came))
            del self._batches[:-_MOST_BATCHES]
            return
        if self._now is _Now.LOSS:
            self._add("forward", asked)
        self._since = asked
        self._add("data_wait", came)
        self._since = came

    def batch_was(self, num_samples: int) -> None:
        """Take a batch that came before anything was watched."""
        self._unclaimed += num_samples

    # --- forward and backward ---------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A training forward begins."""
        now = self.moment()
        step = self._open or self._begin(now)
        step.samples += self._unclaimed
        self._unclaimed = 0
        if self._now is _Now.FORWARD:
            self._add("forward", now)
        elif self._now is _Now.OPTIMIZER:  # in its closure
            self._add("optimizer", now)
        self._now, self._since = _Now.FORWARD, now

    def forward_ends(self) -> None:
        """A training forward is over; the loss comes."""
        if self._open is None or self._now not in (_Now.FORWARD, _Now.LOSS):
            return
        now = self.moment()
        self._add("forward", now)
        self._open.has_forward = True
        self._now, self._since = _Now.LOSS, now

    def idle_forward(self, *, is_over: bool, is_training: bool) -> None:
        """A forward begins, or is over, that does not train, in training mode or not."""
        if self._open is not None:
            self._unclaimed = self._unclaimed if is_training else 0
            return
        now = time.perf_counter()
        if self._evaluation is None:
            began_at = self._batches[0][0][1] if self._batches else now
            self._release(began_at)
            self._evaluation = (began_at, now)
            self._borrowed = self._batches, self._unclaimed
        elif not is_over:
            self._borrowed = None  # a second one: it is an evaluation, and the batches were for that
        if is_over:
            self._evaluation = (self._evaluation[0], now)
        self._batches, self._unclaimed = [], 0

    def backward_begins(self, num_samples: int) -> None:
        """A backward begins, of a forward that got so many samples."""
        now = self.moment()
        if self._open is None:
            self._trains_in_eval, self._evaluation = True, None
        step = self._open or self._begin(now)
        step.has_backward = True
        step.num_inputs += num_samples
        if self._now in (_Now.FORWARD, _Now.LOSS):
            self._add("forward", now)
        self._now, self._since, self._own_done = _Now.BACKWARD, now, None

    def own_work_done(self) -> None:
        """This rank's own work of backward is done."""
        self._own_done, _, _ = self.moment()

    def backward_ends(self, reductions: Sequence[Reduction]) -> None:
        """Backward is over, and the gradients are reduced."""
        if self._open is None or self._now is not _Now.BACKWARD:
            return
        now = self.moment()
        if self._own_done is not None:
            self._open.waits.append((self._own_done, now[0]))
        # Several with micro-batches that are all synchronised; what they waited adds up.
        self._open.reductions += reductions
        self._add("backward", now)
        self._now, self._since = (_Now.OPTIMIZER if self._depth else _Now.OUTSIDE), now
        if self._has_stepped_within:
            self._finish(now)

    # --- optimizers -------------------------------------------------------------------------------------------------

    def optimizer_begins(self, key: int) -> None:
        """An optimizer is about to step; it may be one within another, which counts once."""
        self._depth += 1
        # Wrappers of optimizers call the one within: both have our hooks.
        if self._depth > 1:
            return
        now = self.moment()
        if self._open is None and (self._done is None or key == self._lead or self._batches):
            self._begin(now)
        self._now, self._since = _Now.OPTIMIZER, now

    def optimizer_ends(self, key: int, learning_rate: float | None, *, is_skipped: bool = False) -> None:
        """An optimizer has stepped, or was kept from it as its gradient was not finite."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self.current is None:
            return
        now = self.moment()
        if self._now is _Now.OPTIMIZER:
            self._add("optimizer", now)
        self._now = _Now.OUTSIDE
        is_lead = self._leads(key)
        if self._open is None:  # one right behind the lead
            self.current.end = now[0]
            return
        self._open.is_skipped |= is_skipped
        if is_lead:
            self._open.learning_rate = learning_rate
            self._finish(now)

    def optimizer_within(self, learning_rate: float | None) -> None:
        """An optimizer steps within a backward, whose end then ends the step; maybe many times."""
        if self._open is not None and self._now is _Now.BACKWARD:
            self._has_stepped_within, self._open.learning_rate = True, learning_rate

    def optimizer_failed(self) -> None:
        """An optimizer has raised instead."""
        self._depth, self._now = 0, _Now.OUTSIDE

    def _leads(self, key: int) -> bool:
        self._num_silent = 0 if key == self._lead else self._num_silent + 1
        if self._lead is None or self._num_silent > _SILENT:
            self._lead, self._num_silent = key, 0
        return key == self._lead

    # --- from one step to the next ----------------------------------------------------------------------------------

    def _begin(self, now: Moment) -> Step:
        if self._borrowed is not None and self._borrowed[0] and not self._batches:  # a single forward: no evaluation
            (self._batches, self._unclaimed), self._evaluation = self._borrowed, None
        self._borrowed = None
        mark, at, _ = self._batches[0][0] if self._batches else now
        self._release(at)
        self._report_evaluation(at)
        step = Step(self.num_done, mark, at, time.time() - (time.perf_counter() - at), mark)
        step.spans += [("data_wait", asked[0], came[0], came[2] - asked[2]) for asked, came in self._batches]
        self._batches = []
        self._open, self._now = step, _Now.OUTSIDE
        self._listener.opened(step)
        return step

    def _add(self, phase: str, end: Moment) -> None:
        begin, step = self._since, self.current
        if begin is not None and step is not None:
            step.spans.append((phase, begin[0], end[0], end[2] - begin[2]))

    def _finish(self, now: Moment) -> None:
        """End the open step; it is kept until the next one begins, for a loss that the script gives behind it."""
        assert self._open is not None
        step, self._open, self._has_stepped_within = self._open, None, False
        step.samples = step.samples or self._unclaimed or step.num_inputs
        self._unclaimed = 0 if not step.has_forward else self._unclaimed
        step.end, step.sees_batches = now[0], self.sees_batches
        self._done = step
        self.num_done += 1

    def _release(self, until: float | None) -> None:
        step, self._done = self._done, None
        if step is not None:
            step.interval_s = None if until is None else until - step.began_at
            self._listener.done(step)

    def _report_evaluation(self, until: float | None) -> None:
        if self._evaluation is not None:
            (began_at, ended_at), self._evaluation = self._evaluation, None
            wall_s = time.time() - (time.perf_counter() - began_at)
            self._listener.evaluated(self.num_done, wall_s, (ended_at if until is None else until) - began_at)

    def close(self) -> None:
        """Hand on the last step; one that was not finished is forgotten."""
        self._release(None)
        self._report_evaluation(None)
        self._open = None
