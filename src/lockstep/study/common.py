"""Common parts of the study commands: console, tables, JSON, a median with its range, peak memory, the task."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import comb, isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
from rich import box, table
from rich.console import Console, RenderableType
from rich.text import Text

from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from lockstep.train.task import Task

# Columns that tables never exceed.
WIDTH = 100

MIB = 2**20


def load(task: Task | str, *, prepares: bool = False) -> Task:
    """Return the task itself; ``FILE.py`` and ``FILE.py:NAME`` are loaded. ``prepares``: calls `Task.prepare`."""
    # Imported here, because it imports torch, which takes seconds and is not needed for a report or a table.
    from lockstep.train.task import load_task

    loaded = load_task(task) if isinstance(task, str) else task
    if prepares and loaded.prepare is not None:
        loaded.prepare()
    return loaded


def run_ranks(
    function: Callable[..., Any], *args: Any, devices: int, timeout_s: float | None = None, backend: str | None = None
) -> list[Any]:
    """Launch ``function`` on ranks, with their `World` as its last argument; return the result of each.

    An error in the task is raised without a traceback, since all ranks have the same error.
    """
    from lockstep.launcher.api import launch, raising_task_errors

    with raising_task_errors():
        return launch(_in_world, function, args, backend, devices=devices, timeout_s=timeout_s)


def check_numbers(devices: int, **others: int | None) -> None:
    """Refuse a number below 1 that the user gave by this name, and more devices than there are.

    Raises:
        ConfigurationError: A number is not allowed; says which are.
    """
    from lockstep.base.accelerator import check_count  # torch, see above

    for name, value in {"devices": devices, **others}.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name}={value} is not allowed.\nGive a whole number of at least 1.")
    check_count(devices)


def _in_world(function: Callable[..., Any], args: Sequence[Any], backend: str | None) -> Any:
    from lockstep.comm.world import init

    with init(backend=backend) as world:
        return function(*args, world)


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps at `WIDTH` columns, or at the terminal's width if that is smaller."""
    output = Console(stderr=stderr, highlight=False)
    # A pipe has no width; rich would use 80 columns.
    output.width = min(WIDTH, output.width) if output.is_terminal else WIDTH
    return output


def log(text: str) -> None:
    """Print a line about progress, separate from the results."""
    console(stderr=True).print(Text(text), style="dim")


class Shown(ABC):
    """A result that is printed like the output of its command, and shown as HTML in a notebook."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return it laid out for a terminal."""

    def __repr__(self) -> str:
        """Return the command's output, also for consoles, and for notebooks that are exported as text."""
        return self._print().export_text(styles=False)

    def _repr_html_(self) -> str:
        return self._print().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _print(self) -> Console:
        # In a notebook rich would display the text, which is only recorded here.
        recorder = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False, force_jupyter=False)
        recorder.print(self)
        return recorder


@dataclass(frozen=True)
class Table:
    """A table as data, for a terminal (`rich`) and for a page (`lockstep.study.drawing.html_table`).

    Attributes:
        rows: Of strings, or of `rich.text.Text` for cells that a terminal emphasizes.
        numbers: Columns that are aligned right, and wrapped only if together they are wider than a terminal.
        differs: First cells of the rows that a page emphasizes.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    numbers: Collection[str] = ()
    differs: Collection[str] = ()

    def rich(self) -> table.Table:
        """Return it laid out for a terminal."""
        style = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
        rich_table = table.Table(title=self.title or None, **style)  # type: ignore[arg-type]
        longest = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        is_number = [name in self.numbers for name in self.columns]
        # If there are too many numbers, they are wrapped: rich would leave out the names of the rows.
        is_wide = sum(length + 1 if number else 12 for length, number in zip(longest, is_number, strict=True)) > WIDTH
        for name, number in zip(self.columns, is_number, strict=True):
            rich_table.add_column(
                name, justify="right" if number else "left", no_wrap=number != is_wide, overflow="fold"
            )
        for row in self.rows:
            # As Text, since rich would interpret brackets in a string as markup.
            rich_table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return rich_table


def grid(rows: Iterable[tuple[str, str]], *, gap: int = 1) -> table.Table:
    """Return texts with a label or a dash before each; long texts are indented."""
    layout = table.Table.grid(padding=(0, gap, 0, 0))
    layout.add_column(no_wrap=True, style="dim")
    layout.add_column()
    for label, text in rows:
        layout.add_row(label, Text(text))
    return layout


def to_json(record: dict[str, Any]) -> str:
    """Return JSON; values without a JSON number, such as the loss of a run that diverged, are null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if isfinite(value) else None
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        return [finite(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(finite(record), indent=2, allow_nan=False) + "\n"


# The probability that the true median lies within a spread, and the fewest rounds that can give it.
CERTAINTY, FEWEST_ROUNDS = 0.9, 5


@dataclass(frozen=True)
class Spread:
    """A median with the range in which the true median lies, by the sign test, with 90% certainty.

    The sign test only assumes that all rounds have the same distribution; the noise of a busy machine is not normal. Up
    to seven values the range is from the lowest to the highest; fewer than five cannot reach 90%.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize ``values``, one per round.

        Raises:
            ValueError: There are no values.
        """
        ordered = sorted(values)
        trim = num_trimmed(len(ordered))
        return cls(median(ordered), ordered[trim], ordered[-1 - trim])

    @property
    def relative_width(self) -> float:
        """The width of the range as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    @property
    def shown(self) -> Spread:
        """As tables and sentences show a ratio: verdicts compare what their reader sees, and 1.00 is not faster."""
        return Spread(round(self.median, 2), round(self.low, 2), round(self.high, 2))

    def holds(self, value: float) -> bool:
        """Return whether ``value`` lies within the range, so that the measurement cannot tell the two apart."""
        return self.low <= value <= self.high


def num_trimmed(num_values: int) -> int:
    """Return how many values may be removed at each end before the certainty falls below 90%.

    The median lies outside the range from the (t+1)-th lowest to the (t+1)-th highest of n values exactly if at most t
    of them lie on one of its sides. Each side is equally likely, so the chance is 2 * P(Binomial(n, 1/2) <= t).
    """
    tail = 0.0  # P(Binomial(n, 1/2) <= trim)
    for trim in range((num_values + 1) // 2):
        tail += comb(num_values, trim) / 2**num_values
        if 2 * tail > 1 - CERTAINTY:
            return max(trim - 1, 0)
    return 0


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Summarize the ratios of two candidates, round by round.

    Both ran within the same few seconds of each round, so other load of the machine affects both and cancels out.

    Raises:
        ValueError: The two do not have the same number of rounds.
    """
    return Spread.of([n / d for n, d in zip(numerators, denominators, strict=True)])


def measure_busy_cores() -> float:
    """Return how many cores other programs keep busy. Blocks for half a second."""
    # A load average would include programs of the last minute.
    return float(psutil.cpu_percent(0.5)) / 100 * (psutil.cpu_count() or 1)


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Reset the peak of resident memory to its current value, if the system supports it."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # "reset the peak", see proc(5)


def peak_bytes() -> int:
    """Return the peak of this process's resident memory since the last `reset_peak`."""
    match = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text(errors="replace"))
    # Preferred to getrusage: its peak cannot be reset, and starts with the parent's memory at the fork.
    return 1024 * (int(match[1]) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
