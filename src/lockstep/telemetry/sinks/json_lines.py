"""Figures as lines of JSON in a file; needs nothing but this package."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from lockstep.telemetry.metrics import EventCounts, Snapshot, evaluations, scalars
from lockstep.telemetry.run_record import to_line
from lockstep.telemetry.sinks.factory import MetricsSink, RunInfo

_TAIL_BYTES = 1 << 20
"""So much of a file is looked at for what was written last: some hundred lines, with an evaluation among them."""


@final
class JsonLines(MetricsSink):
    """Appends to a file; a run that begins begins it anew.

    A line's ``kind`` is ``run`` (what the run is), ``metrics``, ``evaluation`` or ``event``.

    Args:
        path: The file; its folder is made if it is not there.
        facts: Of the run.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, facts: RunInfo) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._last_step = -1 if facts.is_fresh else _last_step(path, "metrics")
        self._last_evaluation = -1 if facts.is_fresh else _last_step(path, "evaluation")
        self._tally = EventCounts()
        is_cut = not facts.is_fresh and not _ends_a_line(path)
        self._file = path.open("w" if facts.is_fresh else "a", encoding="utf-8", buffering=1)
        if is_cut:
            self._file.write("\n")
        about = {"name": facts.name, "first_step": facts.first_step, "config": dict(facts.config)}
        self._line({"kind": "run", "time": time.time(), **about})

    @property
    @override
    def where(self) -> str:
        return f"metrics go to {self._path}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._tally.add(snapshot.events)
        for found in evaluations(snapshot):
            if found.step > self._last_evaluation:
                self._last_evaluation = found.step
                about = {"step": found.step, "time": found.time, "metrics": dict(found.metrics)}
                self._line({"kind": "evaluation", **about})
        for event in snapshot.events:
            told = {"event": event.event, "step": event.step, "time": event.time, "rank": event.rank}
            self._line({"kind": "event", **told, "seconds": event.seconds, "text": event.text})
        if snapshot.step > self._last_step:
            self._last_step = snapshot.step
            metrics = scalars(snapshot, self._tally)
            self._line({"kind": "metrics", "step": snapshot.step, "time": snapshot.time, "metrics": metrics})

    @override
    def close(self) -> None:
        self._file.close()

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(to_line(content))


def _tail(path: Path) -> bytes:
    """Return the end of a file; nothing if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _ends_a_line(path: Path) -> bool:
    """Return whether a file that was written before ends with a whole line; a killed process may leave a part."""
    tail = _tail(path)
    return not tail or tail.endswith(b"\n")


def _last_step(path: Path, kind: str) -> int:
    """Return the last step of which the file has a line of ``kind``, -1 if it has none."""
    for line in reversed(_tail(path).splitlines()):
        try:
            content = json.loads(line)
            if content["kind"] == kind:
                return int(content["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
