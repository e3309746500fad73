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

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.accelerator import is_capturing
from lockstep.parallel.module_io import find_tensors
from lockstep.telemetry.instrument import Fail, Hook, Instrument, in_backward
from lockstep.telemetry.step_times import Mark, Reduction, StepMarks
from lockstep.telemetry.timer import Moment, add_span, moment


class Listener(Protocol):
    """Gets the steps."""

    def opened(self, step: StepMarks) -> None:
        """Handle a step that has just begun."""

    def done(self, step: StepMarks) -> None:
        """Handle a complete step; the device may not have completed it."""

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Handle an evaluation: when it began, and how long training paused for it."""


# Batches that are kept until a forward shows whether they are for training.
_MOST_BATCHES = 256

# An optimizer is no longer the lead after so many steps of others without its own.
_SILENT = 8


class _Now(Enum):
    OUTSIDE = "other code of the script"
    FORWARD = "forward"
    LOSS = "between a forward and its backward"
    BACKWARD = "backward"
    OPTIMIZER = "an optimizer's step"


class Steps:
    """Gets the reports of hooks, in the training thread or while that waits for its backward.

    Args:
        device: The device of the model.
        listener: Gets the steps.
        first_step: Number of the first step.

    Attributes:
        num_done: Number of steps done.
        is_over: Whether hooks no longer report.
    """

    def __init__(self, device: torch.device, listener: Listener, first_step: int = 0) -> None:
        self._device, self._listener = device, listener
        self.num_done = first_step
        self.sees_batches = self.is_over = False
        self._thread = get_ident()
        self._now = _Now.OUTSIDE
        self._since: Moment | None = None
        self._own_done: Mark | None = None
        self._open: StepMarks | None = None
        self._done: StepMarks | None = None
        # Batches, and the samples in them, since the last step: those of the next one, or of an evaluation.
        self._batches: list[tuple[Moment, Moment]] = []
        self._unclaimed = 0
        self._num_inputs = 0  # samples given to forwards of the step, for a script without an observed loader
        self._trains_in_eval = False
        self._evaluation: tuple[float, float] | None = None
        self._borrowed: tuple[list[tuple[Moment, Moment]], int] | None = None
        self._lead: int | None = None
        self._num_silent = self._depth = 0
        self._has_stepped_within = False

    # --- the state --------------------------------------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """Whether hooks report."""
        # No event can be recorded while a CUDA graph is captured.
        return not self.is_over and not is_capturing(self._device)

    @property
    def is_mine(self) -> bool:
        """Whether hooks report, and this is the training thread."""
        return get_ident() == self._thread and self.is_watching

    @property
    def in_forward(self) -> bool:
        """Whether a training forward runs."""
        return self._now is _Now.FORWARD

    @property
    def current(self) -> StepMarks | None:
        """The step to which a loss given now belongs: the open one, or else the last."""
        return self._open if self._open is not None else self._done

    @property
    def lacks_samples(self) -> bool:
        """Whether the number of samples of the step is not known from a loader."""
        return self._open is not None and not self._open.samples

    def trains(self, *, has_grad: bool, is_training: bool) -> bool:
        """Return whether a forward trains; see [Note: training or not]."""
        return has_grad and (is_training or self._trains_in_eval)

    def moment(self) -> Moment:
        """Return the present moment."""
        return moment(self._device)

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch(self, asked: Moment, num_samples: int | None) -> None:
        """Report a batch that was requested and has now arrived; without samples if a loader was only started."""
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
        """Report a batch that arrived before the observation began."""
        self._unclaimed += num_samples

    # --- forward and backward ---------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Report the begin of a training forward."""
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
        """Report the end of a training forward."""
        if self._open is None or self._now not in (_Now.FORWARD, _Now.LOSS):
            return
        now = self.moment()
        self._add("forward", now)
        self._now, self._since = _Now.LOSS, now

    def idle_forward(self, *, is_over: bool, is_training: bool) -> None:
        """Report the begin or the end of a forward that does not train."""
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
            self._borrowed = None  # with a second forward, it is an evaluation that uses the batches
        if is_over:
            self._evaluation = (self._evaluation[0], now)
        self._batches, self._unclaimed = [], 0

    def backward_begins(self, num_samples: int) -> None:
        """Report the begin of the backward of a forward with so many samples."""
        now = self.moment()
        if self._open is None:
            self._trains_in_eval, self._evaluation = True, None
            self._begin(now)
        self._num_inputs += num_samples
        if self._now in (_Now.FORWARD, _Now.LOSS):
            self._add("forward", now)
        self._now, self._since, self._own_done = _Now.BACKWARD, now, None

    def own_work_done(self) -> None:
        """Report the end of this rank's own work in backward."""
        self._own_done = self.moment()[0]

    def backward_ends(self, reductions: Sequence[Reduction] | None) -> None:
        """Report the end of backward, with reduced gradients; None: of an engine that does not measure its waits."""
        if self._open is None or self._now is not _Now.BACKWARD:
            return
        now = self.moment()
        if reductions is None:
            reductions = [] if self._own_done is None else [Reduction(waited=(self._own_done, now[0]))]
        # Several if all micro-batches are synchronised; their waits are added.
        self._open.reductions += reductions
        self._add("backward", now)
        self._now, self._since = (_Now.OPTIMIZER if self._depth else _Now.OUTSIDE), now
        if self._has_stepped_within:
            self._finish(now)

    # --- optimizers -------------------------------------------------------------------------------------------------

    def optimizer_begins(self, key: int) -> None:
        """Report the begin of an optimizer step; nested ones count once."""
        self._depth += 1
        # A wrapper calls the inner optimizer, and both have hooks.
        if self._depth > 1:
            return
        now = self.moment()
        if self._open is None and (self._done is None or key == self._lead or self._batches):
            self._begin(now)
        self._now, self._since = _Now.OPTIMIZER, now

    def optimizer_ends(self, key: int, learning_rate: float | None, *, is_skipped: bool = False) -> None:
        """Report the end of an optimizer step, or that it was skipped as the gradient was not finite."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self.current is None:
            return
        now = self.moment()
        if self._now is _Now.OPTIMIZER:
            self._add("optimizer", now)
        self._now = _Now.OUTSIDE
        is_lead = self._leads(key)
        if self._open is None:  # directly after the lead
            self.current.end = now[0]
            return
        self._open.is_skipped |= is_skipped
        if is_lead:
            self._open.learning_rate = learning_rate
            self._finish(now)

    def optimizer_within(self, learning_rate: float | None) -> None:
        """Report an optimizer step within a backward, whose end then ends the step."""
        if self._open is not None and self._now is _Now.BACKWARD:
            self._has_stepped_within, self._open.learning_rate = True, learning_rate

    def optimizer_failed(self) -> None:
        """Report that an optimizer has raised."""
        self._depth, self._now = 0, _Now.OUTSIDE

    def _leads(self, key: int) -> bool:
        self._num_silent = 0 if key == self._lead else self._num_silent + 1
        if self._lead is None or self._num_silent > _SILENT:
            self._lead, self._num_silent = key, 0
        return key == self._lead

    # --- from one step to the next ----------------------------------------------------------------------------------

    def _begin(self, now: Moment) -> StepMarks:
        if (
            self._borrowed is not None and self._borrowed[0] and not self._batches
        ):  # a single forward is not an evaluation
            (self._batches, self._unclaimed), self._evaluation = self._borrowed, None
        self._borrowed = None
        mark, at, *_ = self._batches[0][0] if self._batches else now
        self._release(at)
        self._report_evaluation(at)
        step = StepMarks(self.num_done, mark, at, time.time() - (time.perf_counter() - at), mark)
        for asked, came in self._batches:
            add_span(step, "data_wait", asked, came)
        self._batches = []
        self._open, self._now = step, _Now.OUTSIDE
        self._listener.opened(step)
        return step

    def _add(self, phase: str, end: Moment) -> None:
        begin, step = self._since, self.current
        if begin is not None and step is not None:
            add_span(step, phase, begin, end)

    def _finish(self, now: Moment) -> None:
        """End the open step; keep it until the next one begins, for a loss that is given after it."""
        assert self._open is not None
        step, self._open, self._has_stepped_within = self._open, None, False
        seen = {"data_wait"} if self.sees_batches else set()
        step.unseen = frozenset(("data_wait", "forward", "backward")) - seen.union(phase for phase, *_ in step.spans)
        step.samples = step.samples or self._unclaimed or self._num_inputs
        self._unclaimed, self._num_inputs = 0 if "forward" in step.unseen else self._unclaimed, 0
        step.end = now[0]
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
        """Pass on the last step; drop an incomplete one."""
        self._release(None)
        self._report_evaluation(None)
        self._open = None


# --- from hooks to reports --------------------------------------------------------------------------------------------

# A model may return thousands of tensors, such as caches; hooks on all would slow it down.
_MOST_OUTPUTS = 64


class Hooks:
    """Reports forwards and backwards of models, waiting for batches, and steps of optimizers to `Steps`.

    Args:
        steps: Gets the reports.
        take_stamps: Returns the time stamps of our engine for the backward that has just ended.
        fail: Gets errors of the hooks.

    Attributes:
        stop: Removes all hooks.
    """

    def __init__(self, steps: Steps, take_stamps: Callable[[], list[Reduction] | None], fail: Fail) -> None:
        self._steps, self._fail = steps, fail
        self._instrument = Instrument(fail)
        self.stop = self._instrument.close
        self._on_gradient = self._instrument.backward(
            self._backward_begins,
            steps.own_work_done,
            lambda: steps.backward_ends(take_stamps()),
            is_watching=lambda: steps.is_watching,
        )
        self._num_inputs = self._num_updates = 0
        self._trains = self._is_within = False
        # Weak references, so that optimizers end as without hooks.
        self._are_ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    # --- models ---

    def watch_model(self, model: nn.Module) -> None:
        """Observe a model."""
        self._instrument.forwards(model, self.forward_begins, self._forward_ends)

    def forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Report that a forward begins."""
        if not self._steps.is_mine or in_backward():
            return
        self._trains = self._steps.trains(has_grad=torch.is_grad_enabled(), is_training=model.training)
        if self._trains:
            self._steps.forward_begins()
        else:
            self._steps.idle_forward(is_over=False, is_training=model.training)

    def _forward_ends(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._steps.is_mine or in_backward():
            return
        if torch.is_grad_enabled():
            if self._steps.lacks_samples or not self._trains:
                self._num_inputs = max(self._num_inputs, num_samples(args) or num_samples(kwargs))
            tensors = (output,) if isinstance(output, Tensor) else islice(find_tensors(output), _MOST_OUTPUTS)
            # Backward may start from any output: the first gradient of any of them counts.
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)
        if self._trains:
            self._steps.forward_ends()
        else:
            self._steps.idle_forward(is_over=True, is_training=model.training)

    def _backward_begins(self) -> None:
        self._steps.backward_begins(self._num_inputs)
        self._num_inputs = 0

    # --- loaders ---

    def watch_loaders(self, loaders: Sequence[DataLoader[Any]] | None) -> None:
        """Observe these DataLoaders, or all of the process."""
        self._instrument.loaders(self._timed, loaders)

    def _timed(self, fetch: Callable[[], Any], batch_size: int | None = None) -> Any:
        """Return the result of ``fetch``, and report its time and the number of samples in it.

        Calls that raise, and calls inside others, are not reported.
        """
        if self._is_within or not self._steps.is_mine:
            return fetch()  # the loop waits for the outer of two nested loaders
        asked = self._steps.moment()
        self._is_within = True
        try:
            batch = fetch()
        finally:
            self._is_within = False
        try:
            self._steps.batch(asked, num_samples(batch, batch_size))
        except Exception as error:
            self._fail(error)
        return batch

    def iterated(self, batches: Any) -> Iterator[Any]:
        """Yield from ``batches``, and report the waiting."""
        iterator = self._timed(lambda: iter(batches))
        while True:
            try:
                batch = self._timed(lambda: next(iterator))
            except StopIteration:
                return
            yield batch

    # --- optimizers ---

    def watch_optimizers(self, optimizers: Sequence[Optimizer] | None, models: Sequence[nn.Module]) -> None:
        """Observe these optimizers, or, if ``None``, all that update one of ``models``; more models may be added."""
        self._are_ours.update(dict.fromkeys(optimizers or (), True))
        self._updated = models if optimizers is None else ()
        self._instrument.optimizers(self._optimizer_begins, self._optimizer_ends)
        self._instrument.wrap(GradScaler, "step", self._scaled)

    def _scaled(
        self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Report an optimizer's step that GradScaler skips if a gradient is not finite."""
        if not (scaler.is_enabled() and self._steps.is_mine and self._is_ours(optimizer)):
            return original(scaler, optimizer, *args, **kwargs)
        num_before = self._num_updates
        self._safely(self._steps.optimizer_begins, id(optimizer))
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        except BaseException:
            self._safely(self._steps.optimizer_failed)
            raise
        is_skipped = self._num_updates == num_before
        self._safely(self._steps.optimizer_ends, id(optimizer), learning_rate_of(optimizer), is_skipped=is_skipped)
        return result

    def _safely(self, report: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        Hook(report, self._fail)(*args, **kwargs)

    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not in_backward() and self._steps.is_mine and self._is_ours(optimizer):
            self._steps.optimizer_begins(id(optimizer))

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if in_backward():  # in any thread
            if not self._steps.is_over and self._is_ours(optimizer):
                self._steps.optimizer_within(learning_rate_of(optimizer))
        elif self._steps.is_mine and self._is_ours(optimizer):
            self._num_updates += 1
            self._steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer))

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._are_ours.get(optimizer)
        if known is None and self._updated:
            known = self._are_ours[optimizer] = updates(optimizer, self._updated)
        return bool(known)


def num_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor; 0 without tensors.

    Args:
        batch: From a loader, or the arguments of a forward.
        batch_size: Of the loader: a list with so many items is a list of samples.
    """
    if isinstance(batch, (list, tuple)) and batch:
        first = batch[0]
        if isinstance(first, Tensor) and first.dim() and batch_size is not None and first.shape[0] == batch_size:
            return batch_size  # the usual case
        if isinstance(first, (list, tuple)):
            return len(first)
        if len(batch) == batch_size:
            return batch_size
    elif isinstance(batch, Mapping) and batch:
        first = next(iter(batch.values()))
        if isinstance(first, (list, tuple)) and not any(isinstance(item, Tensor) for item in batch.values()):
            return len(first)
    tensor = next((found for found in find_tensors(batch) if found.dim()), None)
    return 0 if tensor is None else tensor.shape[0]


def updates(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of the models."""
    theirs = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in theirs for group in optimizer.param_groups for parameter in group["params"])


def learning_rate_of(optimizer: Optimizer) -> float | None:
    """Return the learning rate of the first group; None if there is none, or if it is on the device."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) else float(rate)
