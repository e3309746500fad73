"""What ranks write, kept in files of bounded size: one for each rank, and one of JSON lines for programs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import IO

DEFAULT_MIB = 100


class RotatingFile:
    """A file that is given a new beginning when it is half its bound, with the half before beside it.

    A full disk is no reason to end a job: then lines are lost.

    Args:
        path: Is replaced if it is there; the half before is PATH.1.
        max_bytes: Of both together.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._num_bytes = 0
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self.older.unlink(missing_ok=True)

    @property
    def older(self) -> Path:
        """Where the half before is."""
        return self._path.with_name(f"{self._path.name}.1")

    def write(self, line: bytes) -> None:
        """Append a line, which is never cut in two."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: it could not be opened again
            if self._num_bytes and self._num_bytes + len(line) > self._max_bytes // 2:
                self._num_bytes = 0
                self._file.close()
                os.replace(self._path, self.older)
                self._file = self._path.open("wb", buffering=0)
            self._file.write(line)
            self._num_bytes += len(line)

    def close(self) -> None:
        """Close it."""
        self._file.close()


class LogFiles:
    """Where lines go besides the terminal: all of them, whatever the terminal shows.

    Args:
        folder: For a file per rank; ``None`` for none.
        json_file: For one of all ranks; ``None`` for none.
        max_bytes: Of each.
    """

    def __init__(self, folder: Path | None, json_file: Path | None, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._by_rank: dict[int, RotatingFile] = {}
        self._json = None if json_file is None else RotatingFile(json_file, max_bytes)

    def line(self, rank: int, stream: str, text: str) -> None:
        """Keep a line of a rank."""
        if self._folder is not None:
            if rank not in self._by_rank:
                self._by_rank[rank] = RotatingFile(self._folder / f"rank-{rank}.log", self._max_bytes)
            self._by_rank[rank].write(f"{text}\n".encode())
        if self._json is not None:
            entry = {"time": round(time.time(), 6), "rank": rank, "stream": stream, "text": text}
            self._json.write(f"{json.dumps(entry, ensure_ascii=False)}\n".encode())

    def close(self) -> None:
        """Close all files."""
        for file in [*self._by_rank.values(), *([] if self._json is None else [self._json])]:
            file.close()
