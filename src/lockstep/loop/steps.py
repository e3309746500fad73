"""Assembles the steps of a loop from the reports of hooks: batches, forwards, backwards, optimizer steps.

[Note: what a step is]
A step ends with the step of the *lead* optimizer: the first one, or another if that one is no longer used. Optimizers
that step directly after it belong to the same step. A step begins with the first batch, or else the first training
forward, after the step before. The time between two steps belongs to the script.

[Note: training or not]
A forward trains if gradients are recorded and the model is in training mode. A model that is trained in evaluation
mode is recognized by its first backward. Other forwards between two steps are an evaluation: their batches belong to
no step, and training pauses until the next step. Within a step they are a part of it, and so is a single forward on a
batch that is then used for training.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.accelerator import is_capturing
from lockstep.base.containers import find_tensors
from lockstep.loop.instrument import in_backward
from lockstep.telemetry.recorder import Moment, add_span, moment
from lockstep.telemetry.step_times import Mark, Reduction, StepMarks

# Batches that are kept until a forward shows whether they are for training.
_MOST_BATCHES = 256

# An optimizer is no longer the lead after so many steps of others without its own.
_SILENT = 8


class Steps:
    """Gets the reports of hooks, in the training thread or while that waits for its backward.

    Args:
        device: The device of the model.
        done: Gets each complete step, which the device may not have completed, before the next one begins.
        evaluated: Gets each evaluation: number of steps done, when it began, and how long training paused for it.
        first_step: Number of the first step.

    Attributes:
        num_done: Number of steps done.
        trains_in_eval: Whether a model in evaluation mode has been trained.
        is_over: Whether hooks no longer report.
        phase: What runs: ``forward``, ``loss`` (from there to its backward), ``backward``, ``optimizer``; None is other
            code of the script.
    """

    def __init__(
        self, device: torch.device, done: Callable[..., None], evaluated: Callable[..., None], first_step: int = 0
    ) -> None:
        self._device, self._report_done, self._report_evaluated = device, done, evaluated
        self.num_done = first_step
        self._unclaimed = 0  # samples in batches that no forward has used yet
        self.is_over = self.trains_in_eval = self._trains = self._sees_batches = False
        # Threads of a forked process have the same numbers.
        self._thread = os.getpid(), get_ident()
        self.phase: str | None = None
        self._since = moment(device)
        self._own_done: Mark | None = None
        self._open: StepMarks | None = None
        self._done: StepMarks | None = None
        # Batches since the last step: those of the next one, or of an evaluation.
        self._batches: list[tuple[Moment, Moment]] = []
        # Samples given to forwards since the last backward, and before it in this step; for a script whose loader is
        # not observed.
        self._num_inputs = self._num_used = 0
        self._evaluation: tuple[float, float] | None = None
        self._borrowed: tuple[list[tuple[Moment, Moment]], int] | None = None
        self._lead: int | None = None
        self._num_silent = self._depth = 0
        self._has_stepped_within = False

    # --- the state --------------------------------------------------------------------------------------------------

    def is_watching(self) -> bool:
        """Return whether hooks report."""
        # No event can be recorded while a CUDA graph is captured.
        return not self.is_over and not is_capturing(self._device)

    def is_on_training_thread(self) -> bool:
        """Return whether hooks report, and this is the training thread, outside of a backward."""
        return (os.getpid(), get_ident()) == self._thread and not in_backward() and self.is_watching()

    @property
    def current(self) -> StepMarks | None:
        """The step to which a loss given now belongs: the open one, or else the last."""
        return self._open or self._done

    def _enter(self, phase: str | None, now: Moment) -> None:
        """End the phase before, and begin ``phase``."""
        if self.phase is not None and self.current is not None:
            # The loss is computed between a forward and its backward.
            add_span(self.current, "forward" if self.phase == "loss" else self.phase, self._since, now)
        self.phase, self._since = phase, now

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch(self, asked: Moment, num_samples: int) -> None:
        """Report a batch that was requested and has now arrived; without samples if a loader was only started."""
        came = moment(self._device)
        self._depth, self._sees_batches = 0, True
        self._unclaimed += num_samples
        if self._open is None:
            self._batches.append((asked, came))
            del self._batches[:-_MOST_BATCHES]
            return
        then = "loss" if self.phase == "loss" else None
        self._enter("data_wait", asked)
        self._enter(then, came)

    # --- forward and backward ---------------------------------------------------------------------------------------

    def forward_begins(self, *, is_training: bool) -> None:
        """Report the begin of a forward of a model that is in training mode or not."""
        now = moment(self._device)
        self._trains = torch.is_grad_enabled() and (is_training or self.trains_in_eval)
        if self._trains:
            step = self._open or self._begin(now)
            step.samples += self._unclaimed
            self._unclaimed = 0
            self._enter("forward", now)
        elif self._open is not None:
            self._unclaimed = self._unclaimed if is_training else 0
        else:
            if self._evaluation is None:
                began_at = self._batches[0][0][1] if self._batches else now[1]
                self._pass_on(began_at)
                self._borrowed = self._batches, self._unclaimed
            else:
                began_at, _ = self._evaluation
                self._borrowed = None  # with a second forward, it is an evaluation that uses the batches
            self._evaluation = began_at, now[1]
            self._batches, self._unclaimed = [], 0

    def forward_ends(self, num_inputs: int) -> None:
        """Report the end of a forward with so many samples."""
        now = moment(self._device)
        if torch.is_grad_enabled():
            self._num_inputs = max(self._num_inputs, num_inputs)
        if self._trains and self._open is not None and self.phase in ("forward", "loss"):
            self._enter("loss", now)
        elif self._open is None and self._evaluation is not None:
            self._evaluation = self._evaluation[0], now[1]

    def backward_begins(self) -> None:
        """Report the begin of a backward."""
        now = moment(self._device)
        if self._open is None:
            self.trains_in_eval, self._evaluation = True, None
            self._begin(now)
        self._num_used, self._num_inputs = self._num_used + self._num_inputs, 0
        self._enter("backward", now)
        self._own_done = None

    def own_work_done(self) -> None:
        """Report the end of this rank's own work in backward."""
        self._own_done = moment(self._device)[0]

    def backward_ends(self, reductions: Sequence[Reduction] | None) -> None:
        """Report the end of backward, with reduced gradients; None: of an engine that does not measure its waits."""
        if self._open is None or self.phase != "backward":
            return
        now = moment(self._device)
        if reductions is None:
            reductions = [] if self._own_done is None else [Reduction(waited=(self._own_done, now[0]))]
        # Several if all micro-batches are synchronised; their waits are added.
        self._open.reductions += reductions
        self._enter("optimizer" if self._depth else None, now)
        if self._has_stepped_within:
            self._finish(now)

    # --- optimizers -------------------------------------------------------------------------------------------------

    def optimizer_begins(self, key: int) -> None:
        """Report the begin of an optimizer step; nested ones count once."""
        self._depth += 1
        # A wrapper calls the inner optimizer, and both have hooks.
        if self._depth > 1:
            return
        now = moment(self._device)
        if self.phase == "loss":
            self.phase = None  # its backward was not seen
        if self._open is None and (self._done is None or key == self._lead or self._batches):
            self._begin(now)
        self._enter("optimizer", now)

    def optimizer_ends(self, key: int, learning_rate: float | None, *, is_skipped: bool = False) -> None:
        """Report the end of an optimizer step, or that it was skipped as the gradient was not finite."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self.current is None:
            return
        now = moment(self._device)
        self._enter(None, now)
        self._num_silent = 0 if key == self._lead else self._num_silent + 1
        if self._lead is None or self._num_silent > _SILENT:
            self._lead, self._num_silent = key, 0
        if self._open is None:  # directly after the lead
            self.current.end = now[0]
            return
        self._open.is_skipped |= is_skipped
        if key == self._lead:
            self._open.learning_rate = learning_rate
            self._finish(now)

    def optimizer_within(self, learning_rate: float | None) -> None:
        """Report an optimizer step within a backward, whose end then ends the step."""
        if self._open is not None and self.phase == "backward":
            self._has_stepped_within, self._open.learning_rate = True, learning_rate

    # --- from one step to the next ----------------------------------------------------------------------------------

    def _begin(self, now: Moment) -> StepMarks:
        # A single forward is not an evaluation.
        if self._borrowed is not None and self._borrowed[0] and not self._batches:
            (self._batches, self._unclaimed), self._evaluation = self._borrowed, None
        self._borrowed = None
        mark, at, *_ = self._batches[0][0] if self._batches else now
        self._pass_on(at)
        self._open = step = StepMarks(self.num_done, mark, at, _wall_s(at), mark)
        for asked, came in self._batches:
            add_span(step, "data_wait", asked, came)
        self._batches, self.phase = [], None
        return step

    def _finish(self, now: Moment) -> None:
        """End the open step; keep it until the next one begins, for a loss that is given after it."""
        assert self._open is not None
        self._done, self._open, self._has_stepped_within = self._open, None, False
        step = self._done
        seen = {phase for phase, *_ in step.spans} | ({"data_wait"} if self._sees_batches else set())
        step.unseen = frozenset(("data_wait", "forward", "backward")) - seen
        step.samples = step.samples or self._unclaimed or self._num_used
        self._unclaimed, self._num_used = 0 if "forward" in step.unseen else self._unclaimed, 0
        step.end = now[0]
        self.num_done += 1

    def drop(self, num_done: int) -> None:
        """Drop the open step, and go on after ``num_done`` steps: those of this rank that follow are done again."""
        self._pass_on(None)
        self._open, self.phase, self._batches = None, None, []
        self._depth = self._unclaimed = self._num_inputs = self._num_used = 0
        self._has_stepped_within = False
        self.num_done = num_done

    def _pass_on(self, until: float | None) -> None:
        """Pass on the last step and the last evaluation, which lasted until then."""
        if self._done is not None:
            self._done.interval_s = None if until is None else until - self._done.began_at
            self._report_done(self._done)
        if self._evaluation is not None:
            began_at, ended_at = self._evaluation
            paused_s = (ended_at if until is None else until) - began_at
            self._report_evaluated(self.num_done, _wall_s(began_at), paused_s)
        self._done = self._evaluation = None

    def close(self) -> None:
        """Pass on the last step; drop an incomplete one, and end all reports."""
        self._pass_on(None)
        self._open, self.is_over = None, True


def _wall_s(at: float) -> float:
    """Return a time of the host's clock in Unix time."""
    return time.time() - (time.perf_counter() - at)


def num_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor; 0 without tensors.

    Args:
        batch: From a loader, or the arguments of a forward.
        batch_size: Of the loader: a list with so many items is a list of samples.
    """
    values = batch
    # A model may get lists beside tensors, such as one of layers.
    if isinstance(batch, Mapping) and not any(isinstance(value, Tensor) for value in batch.values()):
        values = list(batch.values())
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple)):
        return len(values[0])
    tensor = next((leaf for leaf in find_tensors(batch) if leaf.dim()), None)
    size = 0 if tensor is None else tensor.shape[0]
    return batch_size if isinstance(batch, (list, tuple)) and len(batch) == batch_size != size else size


def updates(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of the models."""
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"])
