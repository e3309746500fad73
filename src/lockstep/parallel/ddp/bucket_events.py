"""When each bucket was ready, launched and reduced, and what a step takes by phase."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import activity
from lockstep.parallel.compile import is_capturing
from lockstep.telemetry.stragglers import StepTimes, ends_window, is_looked_at, note_of, pace_of

# What each step of this rank takes by phase, so that ranks can be compared; see telemetry/stragglers.py.
#
# A rank's own work of a step ends when backward is over and all its buckets are ready, which is stamped before the
# last of them leaves. ``fit`` measures its own phases, and only asks when that was; in other programs the loader has
# what lies between two steps, without the optimizer. Nothing is stamped unless somebody asks, and then in some steps
# only.

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
        if activity.callbacks.waits is not None and not is_capturing(self._device):
            self._ready = self._mark(), activity.now.waited_s

    def end(self) -> None:
        """Take notice that all gradients are reduced: the step is over."""
        if self._ready is not None and activity.callbacks.waits is not None:
            mark, waited_s = self._ready
            activity.callbacks.waits.append((mark, self._mark()))
            activity.now.waited_s = waited_s  # what was waited since is said already
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
        if not activity.callbacks.wants_pace or activity.callbacks.waits is not None:
            return False
        if _publisher() is None:
            _publisher = weakref.ref(self)
        return _publisher() is self

    def _note(self) -> None:
        assert self._step is not None
        self._step.moments.append(self._mark())
        self._step.waited_s.append(activity.now.waited_s)

    def _publish(self) -> None:
        """Tell the beacon the pace of the steps that were looked at. Blocks on CUDA until the last of them is over."""
        steps, self._steps = self._steps, []
        if len(steps) < 2:
            return
        last = steps[-1].moments[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        activity.now.pace = note_of(self._number, pace_of([_times_of(step) for step in steps]))

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


# When each bucket of a step was ready, sent and reduced, for whoever records the run.
#
# The host's clock, or on CUDA events on the streams that the work runs on, which are read later: nothing waits for
# them. How long the step waited for communication is stamped in each step, single buckets only in steps that are
# looked at closely.


@dataclass
class Stamp:
    """A bucket's moments: when its last gradient was there, when it left, and when it was reduced."""

    position: int
    size_bytes: int
    ready: Mark
    sent: Mark | None = None
    done: Mark | None = None


@dataclass
class StepStamps:
    """The moments of one step.

    Attributes:
        buckets: In the order in which they left.
        waited: From when this rank's own work was done, until all buckets were reduced.
        exposed_s: What of that was waiting; None on CUDA, where it is all.
    """

    buckets: list[Stamp] = field(default_factory=list)
    waited: tuple[Mark, Mark] | None = None
    exposed_s: float | None = None


class BucketStamps:
    """Takes the moments of each step.

    Args:
        device: Where the model is.

    Attributes:
        closely: Whether single buckets are stamped in the coming step.
        last: The step that ended last; None once it was taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = StepStamps()
        self._wait_began: Mark | None = None
        self._waited_before_s = 0.0
        self.closely = False
        self.last: StepStamps | None = None

    def ready(self, position: int, size_bytes: int) -> None:
        """Take notice that all gradients of a bucket are there, and it is about to leave."""
        if position == 0:  # an exception may have cut short the step before
            self._now, self._wait_began = StepStamps(), None
        if self.closely:
            self._now.buckets.append(Stamp(position, size_bytes, self._mark()))

    def sending(self) -> None:
        """Take notice that the bucket is put together."""
        if self.closely:
            self._now.buckets[-1].sent = self._mark()

    def sent(self, future: Future[Any]) -> None:
        """Take notice that the bucket has left; ``future`` is done when it is reduced."""
        if not self.closely:
            return
        stamp = self._now.buckets[-1]
        if self._device.type != "cuda" and future.done():
            self._set_done(stamp)
        else:
            future.add_done_callback(lambda _: self._set_done(stamp))

    def _set_done(self, stamp: Stamp) -> None:
        stamp.done = self._mark()  # on CUDA the current stream is one that waits for the reduction

    def begin_wait(self) -> None:
        """Take notice that this rank's own work is done, unless it was before."""
        if self._wait_began is None:
            self._wait_began, self._waited_before_s = self._mark(), activity.now.waited_s

    def end_wait(self, exposed_s: float) -> None:
        """Take notice that all buckets are reduced, for which the host waited so long: the step is over."""
        if self._wait_began is not None:
            self._now.waited = self._wait_began, self._mark()
            activity.now.waited_s = self._waited_before_s  # what was waited since is said here
        self._now.exposed_s = None if self._device.type == "cuda" else exposed_s
        self.last, self._now, self._wait_began = self._now, StepStamps(), None

    def take(self) -> StepStamps | None:
        """Return the step that ended last, once."""
        last, self.last = self.last, None
        return last

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


# How long the parts of some steps took, for ``_get_ddp_logging_data()``.
#
# As in torch, the first steps are looked at, up to number ten, and one of a hundred after those. The others cost a
# comparison for each part of a step. On CUDA the device's own clock is read, later, when somebody asks or the next step
# is looked at: no step waits for it.

_LAST_OF_FIRST = 10
_DEFAULT_RATE = 100


class Moment(Enum):
    """When something begins or ends in a step, by torch's names where it has one."""

    FORWARD = "forward_compute_time_start"
    BACKWARD = "backward_compute_time_start"
    COMMUNICATION = "backward_comm_time_start"
    BACKWARD_END = "backward_compute_time_end"
    COMMUNICATION_END = "backward_comm_time_end"


@dataclass
class _Sample:
    """What is known of one step."""

    iteration: int
    unused_bytes: int = 0
    num_buckets: int = 0
    host_ns: dict[Moment, int] = field(default_factory=dict)
    events: dict[Moment, torch.cuda.Event] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the device has come to its end; where there is no device, the step has ended."""
        event = self.events.get(Moment.COMMUNICATION_END)
        return event is None or event.query()

    def span_ns(self, start: Moment, end: Moment) -> int:
        """Return the time between two moments, 0 if they come in the other order. Blocks on CUDA until `is_known`."""
        if self.events:
            self.events[Moment.COMMUNICATION_END].synchronize()
            return max(0, int(self.events[start].elapsed_time(self.events[end]) * 1e6))
        return max(0, self.host_ns[end] - self.host_ns[start])

    def times_ns(self) -> dict[str, int]:
        """Return what torch reports of a step."""
        return {
            "forward_compute_time": self.span_ns(Moment.FORWARD, Moment.BACKWARD),
            "backward_compute_time": self.span_ns(Moment.BACKWARD, Moment.BACKWARD_END),
            "backward_comm_time": self.span_ns(Moment.COMMUNICATION, Moment.COMMUNICATION_END),
            "backward_compute_comm_overlap_time": self.span_ns(Moment.COMMUNICATION, Moment.BACKWARD_END),
        }


class LoggedTimes:
    """Takes the times of some steps.

    Args:
        device: Where the model is.

    Attributes:
        rate: One of how many steps is looked at, after the first ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.rate = _DEFAULT_RATE
        self._is_sampling = False
        self._device = device
        self._num_forwards = 0
        self._pace = PaceClock(device)
        self._sample = _Sample(0)
        self._last: _Sample | None = None
        self._sums_ns: dict[str, int] = {}
        self._num_summed = 0

    def begin(self) -> None:
        """Take notice that a forward begins whose backward is to be synchronised."""
        self._pace.begin()
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        self._is_sampling = (number <= _LAST_OF_FIRST or number % self.rate == 0) and not is_capturing(self._device)
        if self._is_sampling:
            self._sample = _Sample(number)
            self.mark(Moment.FORWARD)

    def mark(self, moment: Moment) -> None:
        """Take notice of the first ``moment`` of its kind in this step."""
        if moment is Moment.BACKWARD:
            self._pace.backward()
        elif moment is Moment.BACKWARD_END:
            self._pace.ready()
        if not self._is_sampling or moment in self._sample.host_ns:
            return
        self._sample.host_ns[moment] = time.time_ns()
        if self._device.type == "cuda":
            self._sample.events[moment] = event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))

    def end(self, num_buckets: int, unused_bytes: Callable[[], int]) -> None:
        """Take notice that the step is over.

        Args:
            num_buckets: How many were reduced.
            unused_bytes: Returns the size of the parameters that received no gradient on this rank.
        """
        self._pace.end()
        if not self._is_sampling:
            return
        self.mark(Moment.COMMUNICATION_END)
        self._is_sampling = False
        if len(self._sample.host_ns) < len(Moment):  # its buckets left before a forward, or none did
            return
        self._sample.num_buckets, self._sample.unused_bytes = num_buckets, unused_bytes()
        if self._last is not None and self._last.is_known:
            for name, value_ns in self._last.times_ns().items():
                self._sums_ns[name] = self._sums_ns.get(name, 0) + value_ns
            self._num_summed += 1
        self._last = self._sample

    def figures(self) -> dict[str, int]:
        """Return torch's figures, in nanoseconds. Blocks on CUDA until the step that was looked at last is over."""
        last = self._last
        if last is None:
            return {"iteration": 0}
        times_ns = last.times_ns()
        averages = {
            f"avg_{name}": (self._sums_ns.get(name, 0) + value_ns) // (self._num_summed + 1)
            for name, value_ns in times_ns.items()
        }
        return {
            "iteration": last.iteration,
            "num_buckets_reduced": last.num_buckets,
            "unused_parameter_size": last.unused_bytes,
            **times_ns,
            **averages,
            **{moment.value: stamp_ns for moment, stamp_ns in last.host_ns.items()},
        }
