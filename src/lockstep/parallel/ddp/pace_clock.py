"""What each step of this rank takes by phase, so that ranks can be compared; see telemetry/stragglers.py.

A rank's own work of a step ends when backward is over and all its buckets are ready, which is stamped before the last
of them leaves. ``fit`` measures its own phases, and only asks when that was; in other programs the loader has what lies
between two steps, without the optimizer. Nothing is stamped unless somebody asks, and then in some steps only.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import progress
from lockstep.parallel.ddp.capture import is_capturing
from lockstep.telemetry.pace import ends_window, is_looked_at, note_of
from lockstep.telemetry.stragglers import StepTimes, pace_of

Mark = float | torch.cuda.Event


@dataclass
class _Step:
    """The moments of one step, and what this rank had waited in other collectives by then."""

    before: Mark
    waited_s: list[float]
    optimizer: list[tuple[Mark, Mark]]
    moments: list[Mark] = field(default_factory=list)


class PaceClock:
    """Takes the moments of steps.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = 0
        self._last_end: Mark | None = None
        self._step: _Step | None = None
        self._steps: list[_Step] = []
        self._ready: tuple[Mark, float] | None = None

    def begin(self) -> None:
        """Take notice that a forward begins whose backward is to be synchronised."""
        self._ready = None
        if self._step is not None and len(self._step.moments) == 1:
            return  # one of several forwards before a backward
        self._step = None
        if self._last_end is None or not self._publishes():
            return
        self._step = _Step(self._last_end, [], _optimizer.take())
        self._note()

    def backward(self) -> None:
        """Take notice that a backward begins."""
        if self._step is not None and len(self._step.moments) == 1:
            self._note()

    def ready(self) -> None:
        """Take notice that backward is over: all gradients are there, and what is left of them leaves now."""
        if self._step is not None:
            self._note()
        if progress.now.waits is not None and not is_capturing(self._device):
            self._ready = self._mark(), progress.now.waited_s

    def end(self) -> None:
        """Take notice that all gradients are reduced: the step is over."""
        if self._ready is not None and progress.now.waits is not None:
            mark, waited_s = self._ready
            progress.now.waits.append((mark, self._mark()))
            progress.now.waited_s = waited_s  # what was waited since is said already
        if not self._publishes():
            return
        if self._step is not None:
            self._note()
            if len(self._step.moments) == 4:
                self._steps.append(self._step)
            self._step = None
        if ends_window(self._number):
            self._publish()
        self._number += 1
        self._last_end = None
        if is_looked_at(self._number) and not is_capturing(self._device):
            self._last_end = self._mark()
            _optimizer.watch(self)

    def _publishes(self) -> bool:
        """Tell whether the launcher asks for this rank's pace, and this is the first wrapper in it that trains."""
        global _publisher
        if not progress.now.wants_pace or progress.now.waits is not None:
            return False
        if _publisher() is None:
            _publisher = weakref.ref(self)
        return _publisher() is self

    def _note(self) -> None:
        assert self._step is not None
        self._step.moments.append(self._mark())
        self._step.waited_s.append(progress.now.waited_s)

    def _publish(self) -> None:
        """Tell the beacon the pace of the steps that were looked at. Blocks on CUDA until the last of them is over."""
        steps, self._steps = self._steps, []
        if len(steps) < 2:
            return
        last = steps[-1].moments[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        progress.now.pace = note_of(self._number, pace_of([_times_of(step) for step in steps]))

    def _mark(self) -> Mark:
        return _mark_on(self._device)


class _OptimizerClock:
    """Takes when optimizers step, between two steps of the wrapper that tells the pace."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._began: Mark | None = None
        self._spans: list[tuple[Mark, Mark]] = []
        self._is_hooked = False

    def watch(self, clock: PaceClock) -> None:
        """Take them from now on, until `take`."""
        self._device, self._spans = clock._device, []
        if not self._is_hooked:
            self._is_hooked = True
            register_optimizer_step_pre_hook(self._begin)
            register_optimizer_step_post_hook(self._end)

    def take(self) -> list[tuple[Mark, Mark]]:
        """Return when they began and ended."""
        self._device = None
        return self._spans

    def _begin(self, *_: Any) -> None:
        self._began = None if self._device is None else _mark_on(self._device)

    def _end(self, *_: Any) -> None:
        if self._began is not None and self._device is not None:
            self._spans.append((self._began, _mark_on(self._device)))


_optimizer = _OptimizerClock()
_publisher: Any = lambda: None  # noqa: E731 - a weak reference to nothing


def _mark_on(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to another of the same kind, both of which are reached."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start


def _times_of(step: _Step) -> StepTimes:
    forward, backward, ready, end = step.moments
    optimizer_s = sum(seconds_between(*span) for span in step.optimizer)
    in_forward_s, in_backward_s = (step.waited_s[i + 1] - step.waited_s[i] for i in range(2))
    return StepTimes(
        loader=seconds_between(step.before, forward) - optimizer_s,
        forward=seconds_between(forward, backward) - in_forward_s,
        backward=seconds_between(backward, ready) - in_backward_s,
        optimizer=optimizer_s,
        waits=seconds_between(ready, end) + in_forward_s + in_backward_s,
    )
