"""The file of a rank: the lines of its steps and events, on their way to a thread that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.telemetry.record.measured import Measured
from lockstep.telemetry.record.names import EVENT
from lockstep.telemetry.record.thin import Thinner
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.recorded_lines import step_line, timeline_line
from lockstep.train.step_begin import StepBegin

if TYPE_CHECKING:
    from lockstep.train.recording import Pending


class RecordedFile:
    """Takes steps and events in their order.

    Args:
        writer: Of the file.
        steps_per_epoch: None for a stream.
    """

    def __init__(self, writer: LineWriter, steps_per_epoch: int | None) -> None:
        self._writer, self._steps_per_epoch = writer, steps_per_epoch
        self._thinner, self._begins = Thinner(), StepBegin()

    def step(self, pending: Pending, measured: Measured) -> None:
        """Take a step that is known."""
        began_s = self._begins.of(
            pending.record.watch.start,
            wall_s=pending.wall_s,
            began_at=pending.began_at,
            total_s=measured.total_s,
        )
        line = self._thinner.add(step_line(pending, measured, began_s, self._steps_per_epoch))
        if line is not None:
            self._writer.add(line)
        if pending.closely:
            self._writer.add(timeline_line(pending, began_s))

    def event(self, line: Mapping[str, Any]) -> None:
        """Take an event."""
        self._writer.add({"kind": "event", **{name: line[name] for name in EVENT}})
        if line["seconds"] is not None:
            self._begins.forget()

    def close(self) -> None:
        """Write what is left. Blocks some seconds at most, for the disk."""
        if (rest := self._thinner.rest()) is not None:
            self._writer.add(rest)
        self._writer.close()
