"""What rank zero shows of a run: a bar on a terminal, lines in a pipe, nothing when quiet."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_REFRESH_S = 0.25
_LINE_S = 10.0


class Display(ABC):
    """Shows a run; asked before each showing, so that a loss is only read from the device when it is shown.

    Args:
        num_steps: Steps of the whole run.
        first_step: Steps done before, in a run that is resumed.
    """

    every_s: float
    """Seconds between two showings of the progress."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self.num_steps, self.first_step = num_steps, first_step
        self._started_at = self._shown_at = time.perf_counter()

    def is_due(self) -> bool:
        """Return whether to call `show`."""
        return time.perf_counter() - self._shown_at >= self.every_s

    def show(self, step: int, loss: float, samples_per_s: float) -> None:
        """Show that ``step`` steps are done."""
        self._shown_at = time.perf_counter()
        self._show(step, loss, samples_per_s)

    def left_s(self, step: int) -> float:
        """Return the seconds that are left at the pace so far."""
        elapsed_s = time.perf_counter() - self._started_at
        return elapsed_s / max(1, step - self.first_step) * (self.num_steps - step)

    @abstractmethod
    def _show(self, step: int, loss: float, samples_per_s: float) -> None: ...

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line that stays."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


class Bar(Display):
    """A bar that is drawn anew, on a terminal."""

    every_s = _REFRESH_S

    def __init__(self, num_steps: int, first_step: int) -> None:
        super().__init__(num_steps, first_step)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            transient=True,
        )
        self._bar = self._progress.add_task("", total=num_steps, completed=first_step, text="")
        self._progress.start()

    def _show(self, step: int, loss: float, samples_per_s: float) -> None:
        self._progress.update(self._bar, completed=step, text=f"loss {loss:.4f}  {samples_per_s:,.0f} samples/s ")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class Lines(Display):
    """A line now and then, in a pipe or a file."""

    every_s = _LINE_S

    def _show(self, step: int, loss: float, samples_per_s: float) -> None:
        left = f"{self.left_s(step):,.0f} s left"
        self.say(f"step {step}/{self.num_steps}  loss {loss:.4f}  {samples_per_s:,.0f} samples/s  {left}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Do nothing."""


class Silence(Display):
    """Nothing at all."""

    every_s = float("inf")

    def _show(self, step: int, loss: float, samples_per_s: float) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_display(num_steps: int, first_step: int, *, silent: bool) -> Display:
    """Return what suits where the output goes."""
    if silent:
        return Silence(num_steps, first_step)
    if sys.stdout.isatty() and Console().is_terminal:
        return Bar(num_steps, first_step)
    return Lines(num_steps, first_step)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as words and numbers."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
