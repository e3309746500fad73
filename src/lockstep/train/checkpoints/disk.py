"""The few operations with which a checkpoint changes what is on disk: tests stop the process at each of them."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are not there."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> FileIO:
    """Open a file that is not there yet, for writing without a buffer."""
    return open(path, "xb", buffering=0)


def write(file: FileIO, piece: memoryview) -> None:
    """Write all of ``piece``."""
    while len(piece):
        num_bytes = file.write(piece)
        assert num_bytes is not None, "the file blocks"
        piece = piece[num_bytes:]


def flush(file: FileIO) -> None:
    """Block until the file is on disk."""
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Block until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """Give a file or folder another name, in one go; a file takes the place of the one that has the name."""
    path.replace(new)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()
