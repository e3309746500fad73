"""How far the tuning is: a bar with the time left on a terminal, lines in a pipe, nothing for those who want quiet."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from lockstep.study.compare.table import console
from lockstep.study.tune.ask import Ask, read_mark

_EVERY_S = 0.25


class TuneProgress:
    """Shows what the ranks note; a context manager that leaves the terminal as it was.

    Args:
        ask: Says how much time there is.
        folder: In which the ranks note what they are doing.
        shown: Whether to show anything.
    """

    def __init__(self, ask: Ask, folder: Path, *, shown: bool) -> None:
        self._ask, self._folder, self._shown = ask, folder, shown
        self._console = console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not (shown and self._console.is_terminal),
        )
        self._line = self._bar.add_task("starting", total=1.0, left="")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._last_stage = ""

    def __enter__(self) -> TuneProgress:
        if self._shown:
            self._bar.start()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._shown:
            self._thread.join()
            self._bar.stop()

    def _watch(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            self.show()

    def show(self) -> None:
        """Show what is being done now."""
        mark, elapsed_s = read_mark(self._folder), self._ask.elapsed_s
        left = f"at most {clock(self._ask.seconds - elapsed_s)} left"
        part = mark["over"] / mark["stages"] if mark else 0.0
        self._bar.update(
            self._line, description=describe(mark), completed=max(part, elapsed_s / self._ask.seconds), left=left
        )
        stage = mark.get("stage", "")
        if stage != self._last_stage and not self._console.is_terminal:
            self._console.print(f"{stage}, {left}")
            self._last_stage = stage


def describe(mark: dict[str, object]) -> str:
    """Return in a few words what is being done."""
    if not mark:
        return "starting"
    name = "" if mark["name"] == "now" else f" {mark['name']}"
    number = f", round {int(str(mark['round'])) + 1}" if mark["round"] else ""
    return f"{mark['stage']}:{name}{number}" if name else f"{mark['stage']}{number}"


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
