"""What the ranks write down of the faults that struck them, for the command to read; a file for each rule."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Note:
    """When and where a fault struck for the first time."""

    rank: int
    step: int
    time_ns: int
    detail: str = ""


def write(folder: Path, number: int, *, rank: int, step: int, detail: str = "") -> bool:
    """Note that the fault with this number strikes now; return whether it is for the first time.

    The file outlives the rank, so a rank that was started again knows that the fault is spent.
    """
    try:
        descriptor = os.open(_path(folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with open(descriptor, "w") as file:
        json.dump(asdict(Note(rank, step, time.time_ns(), detail)), file)
    return True


def is_spent(folder: Path, number: int) -> bool:
    """Say whether the fault has struck already, in this process or one before it."""
    return _path(folder, number).exists()


def read(folder: Path, number: int) -> Note | None:
    """Return what was noted; ``None`` if the fault has not struck."""
    try:
        return Note(**json.loads(_path(folder, number).read_text()))
    except (FileNotFoundError, ValueError):  # ValueError: the rank was killed before it had written anything
        return None


def _path(folder: Path, number: int) -> Path:
    return folder / f"fault-{number}.json"
