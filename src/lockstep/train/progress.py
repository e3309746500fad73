"""What rank zero shows of a run: a live view on a terminal or in a notebook, lines in a pipe, nothing when quiet."""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from lockstep.launcher import requests
from lockstep.telemetry.live import remote, words
from lockstep.telemetry.live.notebook import NotebookRegion, is_notebook
from lockstep.telemetry.live.picture import picture
from lockstep.telemetry.live.region import Region
from lockstep.telemetry.live.snapshot import EventFigures, Snapshot, SnapshotSink
from lockstep.train.settings import ViewName

_LINE_S = 10.0
_SHOWN_EVENTS = 3
_PRINTED_EVENTS = ("evaluation", "skipped", "straggler", "remark")
"""These are printed, too, and stay."""


class Display(SnapshotSink):
    """Shows a run: snapshots now and then, from a thread beside training, and lines that stay."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line that stays."""


class _Printing(Display):
    """Prints lines that stay to standard output."""

    @override
    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")  # in one piece: other threads print as well
        sys.stdout.flush()


class _LastRates:
    """Remembers how fast the run was, for snapshots since which no step was done."""

    def __init__(self) -> None:
        self._last: tuple[float | None, float | None] = None, None

    def filled(self, snapshot: Snapshot) -> Snapshot:
        """Return ``snapshot`` with the last rates there were."""
        if snapshot.samples_per_s is None:
            return replace(snapshot, samples_per_s=self._last[0], tokens_per_s=self._last[1])
        self._last = snapshot.samples_per_s, snapshot.tokens_per_s
        return snapshot


class Live(_Printing):
    """A view that is drawn anew in place.

    Args:
        region: Where: on a terminal, or in a notebook.
        folder: Of the run of the launcher of this rank, if there is one, which writes to the same terminal.
    """

    def __init__(self, region: Region | NotebookRegion, folder: Path | None = None) -> None:
        self._region, self._folder = region, folder
        self._rates = _LastRates()
        self._events: deque[EventFigures] = deque(maxlen=_SHOWN_EVENTS)

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._events += shown(snapshot)
        self._look_at_launcher()
        width, height = self._region.size
        self._region.show(picture(self._rates.filled(snapshot), list(self._events), width=width, height=height))

    @override
    def close(self) -> None:
        self._look_at_launcher()
        self._region.close()

    def _look_at_launcher(self) -> None:
        """Look once whether the launcher has written its answer to Ctrl-C below the view."""
        if self._folder is not None and requests.asked(self._folder) == signal.SIGINT.name:
            self._folder = None
            self._region.disturbed(requests.FIRST_CTRL_C.decode())


class Remote(_Printing):
    """Sends snapshots to the launcher of this rank, which has the terminal or the notebook.

    Args:
        folder: Of the launcher's run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._rates = folder, _LastRates()
        self._events: deque[EventFigures] = deque(maxlen=_SHOWN_EVENTS)
        self._is_closed = False

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._events += shown(snapshot)
        if not self._is_closed:
            remote.send(self._folder, self._rates.filled(snapshot), self._events)

    @override
    def close(self) -> None:
        self._is_closed = True
        remote.withdraw(self._folder)


class Lines(_Printing):
    """A line now and then, in a pipe or a file."""

    every_s = _LINE_S
    """Seconds between two lines."""

    def __init__(self) -> None:
        self._shown_at = time.perf_counter()
        self._rates = _LastRates()

    @override
    def update(self, snapshot: Snapshot) -> None:
        snapshot = self._rates.filled(snapshot)
        now_s = time.perf_counter()
        if now_s - self._shown_at >= self.every_s and snapshot.loss is not None and not snapshot.is_last:
            self._shown_at = now_s
            self.say(words.line(snapshot))

    @override
    def close(self) -> None:
        """Do nothing."""


class Silence(Display):
    """Nothing at all."""

    @override
    def update(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    @override
    def say(self, text: str) -> None:
        """Do nothing."""

    @override
    def close(self) -> None:
        """Do nothing."""


class Said(_Printing):
    """Only the lines that stay, and no progress."""

    @override
    def update(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    @override
    def close(self) -> None:
        """Do nothing."""


def make_display(view: ViewName = "auto", *, silent: bool) -> Display:
    """Return what suits where the output goes, unless ``view`` says what it is to be; nothing if ``silent``."""
    if silent:
        return Silence()
    if view == "none":
        return Said()
    if view == "auto" and "CI" in os.environ:
        return Lines()
    if view != "lines" and (live := _live()) is not None:
        return live
    return Lines()


def shown(snapshot: Snapshot) -> list[EventFigures]:
    """Return the new events that have a place in a view."""
    return [event for event in snapshot.events if event.event not in _PRINTED_EVENTS]


def _live() -> Display | None:
    """Return a live view, if there is where to show one."""
    folder = requests.run_dir()
    if folder is not None and remote.is_offered(folder):
        return Remote(folder)
    if is_notebook():
        return Live(NotebookRegion())
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return Live(Region(sys.stdout), folder)
    return None


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as words and numbers."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
