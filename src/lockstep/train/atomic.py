"""Files that are there in whole or not at all, whenever the process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_SUFFIX = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to; what was written there is ``path`` once the block is left, and on disk.

    An error in the block, or the end of the process, leaves ``path`` as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
        _flush(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path, flags: int) -> None:
    """Block until the file, or the entries of the folder, are on disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
