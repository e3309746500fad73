"""What a sink is, what it is told of a run when it begins, and what it remembers from one session to the next."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.telemetry.metrics import SnapshotSink

Plain = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run that begins, or goes on.

    Attributes:
        name: Of its task.
        config: All that it depends on, by name: settings, sizes, versions, commits.
        first_step: Steps done before.
        is_fresh: Whether it begins; else it goes on where an earlier session ended.
        memory: Folder in which is kept what the next session needs to go on in the same places, if there is one.
    """

    name: str
    config: Mapping[str, Plain]
    first_step: int = 0
    is_fresh: bool = True
    memory: Path | None = None


class MetricsSink(SnapshotSink):
    """A sink that can say where its figures are to be seen."""

    @property
    @abstractmethod
    def where(self) -> str:
        """One line for whoever started the run."""


# What sinks remember from one session of a run to the next: the id under which a service knows it, and how far it is.
#
# A run that goes on from a checkpoint does some steps again. Services want steps that only grow, so what has been
# told is remembered, too; the steps done again have the same figures anyway.

SINK_STATE_FILE = "sinks.json"


class SinkState:
    """What one sink remembers.

    Args:
        target: The sink, as ``log_to`` names it.
        facts: Of the run; without a folder, nothing is remembered.

    Attributes:
        run_id: Under which the service knows the run; None before it does.
        last_step: The last step that was told; -1 before the first.
        last_evaluation: The step of the last evaluation that was told, likewise.
    """

    def __init__(self, target: str, facts: RunInfo) -> None:
        self._target = target
        self._path = None if facts.memory is None else facts.memory / SINK_STATE_FILE
        self.run_id: str | None = None
        self.last_step = self.last_evaluation = -1
        if self._path is not None and not facts.is_fresh:
            with suppress(KeyError, TypeError, ValueError):
                mine = _read(self._path)[target]
                numbers = int(mine["last_step"]), int(mine["last_evaluation"])
                self.run_id = str(mine["run_id"])
                self.last_step, self.last_evaluation = numbers

    def begin(self, run_id: str) -> None:
        """Remember that the service now knows the run as ``run_id``; of another run than before, no step is known."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.last_step = self.last_evaluation = -1
        self._write()

    def is_new(self, step: int) -> bool:
        """Return whether the figures after ``step`` steps were not told yet."""
        return step > self.last_step

    def told(self, step: int) -> None:
        """Remember that the figures after ``step`` steps were told."""
        self.last_step = step
        self._write()

    def is_new_evaluation(self, step: int) -> bool:
        """Return whether the evaluation after ``step`` steps was not told yet."""
        return step > self.last_evaluation

    def told_evaluation(self, step: int) -> None:
        """Remember that the evaluation after ``step`` steps was told."""
        self.last_evaluation = step
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        # Not flushed to the disk: it is written every other second, and worth little.
        with suppress(OSError):
            mine = {"run_id": self.run_id, "last_step": self.last_step, "last_evaluation": self.last_evaluation}
            content = _read(self._path) | {self._target: mine}
            temporary = self._path.with_name(f"{SINK_STATE_FILE}.{os.getpid()}.partial")
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(temporary, self._path)


def _read(path: Path) -> dict[str, Any]:
    """Return what all sinks of a run remember; nothing if the file is not there, or is none of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
