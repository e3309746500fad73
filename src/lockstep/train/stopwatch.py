"""Where the time of a step goes: laps on the host's clock, or on CUDA events that nothing waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lockstep import progress
from lockstep.train.phase_ranges import PhaseRanges

_NEXT = {
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
        self._waited_s = [progress.now.waited_s]
        progress.now.phase = "loader"

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
        self._waited_s.append(progress.now.waited_s)
        progress.now.phase = _NEXT[phase]
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
