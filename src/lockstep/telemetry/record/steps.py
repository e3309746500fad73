"""The lines of steps on their way to the file: those that were far too long are told of, and many share a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.telemetry.record.measured import Measured
from lockstep.telemetry.record.spikes import Spikes
from lockstep.telemetry.record.thin import Thinner

Line = dict[str, Any]

TIMELINE_FIRST, TIMELINE_STEPS = 4, 4


def has_timeline(step: int) -> bool:
    """Return whether a step has a timeline, the same on every rank: four of 64, from step 4096 on ever fewer."""
    period = max(64, 1 << (step.bit_length() - 6)) if step >= 4096 else 64
    return (step - TIMELINE_FIRST) % period < TIMELINE_STEPS


class StepLines:
    """Takes the line of each step.

    Args:
        add: Gets those to write, and the event of a step that took far too long.
    """

    def __init__(self, add: Callable[[Line], None]) -> None:
        self._add = add
        self._thinner, self._spikes = Thinner(), Spikes()

    def take(self, line: Line) -> None:
        """Take the line of the next step."""
        text = self._spikes.look(Measured(**{name: line[name] for name in Measured._fields}))
        if text is not None:
            self._add(spike_line(line["step"], line["time"], text))
        if (ready := self._thinner.add(line)) is not None:
            self._add(ready)

    def close(self) -> None:
        """Give what is held, if anything is."""
        if (rest := self._thinner.rest()) is not None:
            self._add(rest)


def spike_line(step: int, time: float, text: str) -> Line:
    """Return the event of a step, counted from 0, that began at ``time`` and took far too long."""
    return {"kind": "event", "event": "spike", "step": step + 1, "time": time, "seconds": None, "text": text}
