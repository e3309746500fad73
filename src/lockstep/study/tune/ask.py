"""What `tune` was asked for, checked; and its file in which all is noted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.study.tune.values import Values
from lockstep.train.task import Task

JOURNAL, MARK, RECORD, OVERDUE = "journal.jsonl", "mark.json", "record", "overdue"
"""Files in the folder of a tuning: entries, what is being done, the recorded run, and that something took too long."""


@dataclass(frozen=True)
class Ask:
    """What to do; the same on every rank.

    Args:
        task: The task, or where to find it, as on the command line.
        num_devices: Devices for all strategies but ``single``.
        on_cuda: Whether they are GPUs.
        num_cores: That a plain process would use.
        global_batch_size: Samples of a step.
        start: Settings to begin with, those that are not the default.
        strategies: That may be tried.
        seconds: How long all of it may take.
        began_at: When it began, in Unix time.
        limit_bytes: What one process may use of the memory.
        allow_precision: Whether another arithmetic may be taken.
        allow_division: Whether batches may be divided otherwise though layers of the model see that.
    """

    task: Task | str
    num_devices: int
    on_cuda: bool
    num_cores: int
    global_batch_size: int
    start: Values
    strategies: tuple[str, ...]
    seconds: float
    began_at: float
    limit_bytes: int | None
    allow_precision: bool = False
    allow_division: bool = False

    @property
    def elapsed_s(self) -> float:
        """How long it has been going on."""
        return time.time() - self.began_at

    @property
    def reserve_s(self) -> float:
        """What is kept for the last stage."""
        return min(20.0, 0.2 * self.seconds)

    @property
    def turn_s(self) -> float:
        """How long the fastest one's turn takes: half a second, if there are five minutes."""
        return min(0.5, max(0.03, self.seconds / 600))

    @property
    def longest_s(self) -> float:
        """How long anything may take before it is given up."""
        return max(20.0, 0.25 * self.seconds)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """Return the entries; without the last one if its writer was killed over it."""
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def write_entry(folder: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry to the journal."""
    with open(folder / JOURNAL, "a", encoding="utf-8") as file:
        file.write(json.dumps(dict(entry)) + "\n")


def read_mark(folder: Path) -> dict[str, Any]:
    """Return what is being done; nothing before that is known."""
    try:
        found: dict[str, Any] = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found


def write_mark(folder: Path, mark: Mapping[str, Any]) -> None:
    """Note what is being done, in a way that a reader never sees half of it."""
    other = folder / f"{MARK}.new"
    other.write_text(json.dumps(dict(mark)), encoding="utf-8")
    other.replace(folder / MARK)
