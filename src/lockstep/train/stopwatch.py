"""Where the time of a step goes: laps on the host's clock, or on CUDA events that nothing waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lockstep import progress

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
    """Sorts the time since the last lap into phases; on CUDA it is the device's time and read only at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[str, Mark]] = [("", self.mark())]
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
        progress.now.phase = _NEXT[phase]

    def read(self) -> PhaseTimes:
        """Return the seconds by phase. Blocks on CUDA until the device has come to the last lap."""
        seconds = dict.fromkeys(PHASES, 0.0)
        last = self._laps[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        for (_, start), (phase, end) in zip(self._laps, self._laps[1:], strict=False):
            seconds[phase] += _seconds_between(start, end)
        return PhaseTimes(**seconds)


def _seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start
