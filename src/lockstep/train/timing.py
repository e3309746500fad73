"""Where the time of a step goes: laps on the host's clock, or on CUDA events that nothing waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from lockstep import activity
from lockstep.telemetry import ranges
from lockstep.telemetry.ranges import Range, Ranges

# The phases of a step as ranges for a profiler: each begins where the one before ends.

_NEXT_RANGE = {
    "data_wait_s": "forward",
    "forward_s": "backward",
    "backward_s": "data_wait",
    "communication_s": "optimizer",
}
"""By phase that ends, the one that begins; after the optimizer there is none."""


class PhaseRanges:
    """The phase that a step is in, as a range.

    Args:
        made_by: Who makes them.
    """

    def __init__(self, made_by: Ranges) -> None:
        self._made_by = made_by
        self._open: Range | None = None
        self._ended = ""
        self.begin("data_wait")

    def begin(self, name: str) -> None:
        """End the phase that there is, and begin another."""
        self.end()
        self._open = self._made_by.open(name)

    def lap(self, phase: str) -> None:
        """Take notice that ``phase`` has ended, by its name in a `Stopwatch`."""
        follows = _NEXT_RANGE.get(phase)
        if phase == "data_wait_s" and self._ended not in ("", "data_wait_s"):
            follows = "data_wait"  # samples to come were asked for; now they are waited for
        self._ended = phase
        self.end()
        if follows is not None:
            self.begin(follows)

    def end(self) -> None:
        """End the phase that there is."""
        if self._open is not None:
            self._open.close()
            self._open = None


def follow_phases() -> PhaseRanges | None:
    """Return what names the phases of the coming step, if somebody looks."""
    return None if ranges.now is None else PhaseRanges(ranges.now)


# Where the time of a step goes: laps on the host's clock, or on CUDA events that nothing waits for.

_NEXT_PHASE = {
    "data_wait_s": "forward",
    "forward_s": "backward",
    "backward_s": "loader",
    "communication_s": "optimizer",
    "optimizer_s": "",
}
"""By phase that ends, the one that begins, for the watchdog's report."""

PHASES = ("data_wait_s", "forward_s", "backward_s", "communication_s", "optimizer_s")


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of a step by what they went into.

    ``backward_s`` holds the gradient communication, overlapped or not; ``communication_s`` only what is left to wait
    for after it, such as the sum of the losses.
    """

    data_wait_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    communication_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.data_wait_s + self.forward_s + self.backward_s + self.communication_s + self.optimizer_s


Mark = float | torch.cuda.Event


class Stopwatch:
    """Sorts the time since the last lap into phases; on CUDA it is the device's time and read only at the end.

    Args:
        device: Whose time it is.
        named: Told of the phases as well, while somebody looks.
    """

    def __init__(self, device: torch.device, named: PhaseRanges | None = None) -> None:
        self._device, self._named = device, named
        self._laps: list[tuple[str, Mark]] = [("", self.mark())]
        self._waited_s = [activity.now.waited_s]
        activity.now.phase = "loader"

    def mark(self) -> Mark:
        """Return the present moment, on CUDA that at which the current stream gets here."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self, phase: str, *, at: Mark | None = None) -> None:
        """Count the time since the last lap, up to now or the moment ``at``, as ``phase``."""
        assert phase in PHASES, phase
        self._laps.append((phase, self.mark() if at is None else at))
        self._waited_s.append(activity.now.waited_s)
        activity.now.phase = _NEXT_PHASE[phase]
        if self._named is not None and at is None:
            self._named.lap(phase)

    def begins(self, name: str) -> None:
        """Name what begins now for a profiler, where laps do not tell it."""
        if self._named is not None:
            self._named.begin(name)

    def read(self) -> PhaseTimes:
        """Return the seconds by phase. Blocks on CUDA until the device has come to the last lap."""
        seconds = dict.fromkeys(PHASES, 0.0)
        last = self._laps[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        for (_, start), (phase, end) in zip(self._laps, self._laps[1:], strict=False):
            seconds[phase] += seconds_between(start, end)
        return PhaseTimes(**seconds)

    def read_waited(self) -> PhaseTimes:
        """Return how long the host was in collectives that block it, in each phase, without those of the engine."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for before_s, after_s, (phase, _) in zip(self._waited_s, self._waited_s[1:], self._laps[1:], strict=False):
            seconds[phase] += after_s - before_s
        return PhaseTimes(**seconds)

    @property
    def laps(self) -> list[tuple[str, Mark]]:
        """Each phase with the moment at which it ended, after the one at which the watch was made."""
        return self._laps

    @property
    def waited_s(self) -> list[float]:
        """By lap, how long this process had waited in collectives by then, those of the engine left out."""
        return self._waited_s

    @property
    def is_over(self) -> bool:
        """Whether the device has come to the last lap; `read` then does not block."""
        last = self._laps[-1][1]
        return not isinstance(last, torch.cuda.Event) or last.query()

    @property
    def start(self) -> Mark:
        """The moment at which the watch was made."""
        return self._laps[0][1]

    def spans(self) -> list[tuple[str, float, float]]:
        """Return phases with their begin and end in seconds since `start`. Blocks as `read` does."""
        last = self._laps[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        ends = [seconds_between(self.start, mark) for _, mark in self._laps]
        return [(self._laps[place][0], ends[place - 1], ends[place]) for place in range(1, len(ends))]


def seconds_between(start: object, end: object) -> float:
    """Return the seconds from one mark to another, which are both of the host or both of a CUDA device."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start


# What is known of a step afterwards.


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


# When steps began, on the clock of this rank's host.
#
# [Note: when a step began]
# On CPUs the host's clock says so. On CUDA a step begins when the device gets to it, which may be long after the host
# has asked for it. Device times are differences of events, so each step's beginning is that of the step before plus
# the difference; never earlier than the host asked for it, and never later than the host saw it done.


class StepBegin:
    """Tells of each step when it began; asked in their order, when the device is done with them."""

    def __init__(self) -> None:
        self._last: tuple[Mark, float] | None = None

    def of(self, start: Mark, *, wall_s: float, began_at: float, total_s: float) -> float:
        """Return when a step began, in Unix time; see [Note: when a step began].

        Args:
            start: Its first mark.
            wall_s: When the host asked for it, in Unix time.
            began_at: The same by the clock that host marks are of.
            total_s: How long it took.
        """
        if isinstance(start, float):
            return wall_s + (start - began_at)
        began_s = wall_s
        if self._last is not None:
            before, before_s = self._last
            began_s = max(began_s, min(before_s + seconds_between(before, start), time.time() - total_s))
        self._last = start, began_s
        return began_s

    def forget(self) -> None:
        """Take notice that the device has come to rest: the host's clock tells when the next step begins."""
        self._last = None


# When a rank's own work of a step is done, for engines that do not say so; see telemetry/stragglers.py.


@contextmanager
def compute_end_marked(loss: Tensor, watch: Stopwatch) -> Iterator[None]:
    """Within, ``loss`` is differentiated by torch's engine: tell `progress` when this rank was done, and when all were.

    What autograd calls when a backward is over it calls in the order in which that was asked for. The engine asks when
    its last bucket leaves, to wait for all of them; here it is asked for when backward begins, so that is before the
    wait. Does nothing if nobody wants to know.
    """
    waits = activity.callbacks.waits
    if waits is None:
        yield
        return
    computed: list[Mark] = []

    def on_computed() -> None:
        computed.append(watch.mark())

    def on_begin(_gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(on_computed)

    handle = loss.register_hook(on_begin)
    try:
        yield
    finally:
        handle.remove()
    if computed:
        waits.append((computed[0], watch.mark()))


def mark_compute_end(watch: Stopwatch) -> None:
    """Tell `progress` that this rank's own work is known, as what it waits for has a lap of its own or is counted."""
    if activity.callbacks.waits is not None:
        now = watch.mark()
        activity.callbacks.waits.append((now, now))


@contextmanager
def compute_end_unknown(watch: Stopwatch) -> Iterator[None]:
    """Within, this rank works and waits in turns that nobody can tell apart: all of it may have been waiting."""
    waits = activity.callbacks.waits
    began = None if waits is None else watch.mark()
    yield
    if waits is not None:
        waits.append((began, watch.mark()))
