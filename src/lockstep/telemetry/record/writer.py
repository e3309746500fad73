"""Appends lines of JSON to a file from a thread of its own: whoever has something to write never waits."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigurationError

FLUSH_S = 1.0
_JOIN_S = 10.0
_MOST_WAITING = 100_000
"""Lines that may wait for a disk that does not take them; then the oldest are dropped."""

_COMPACT = (",", ":")


class LineWriter:
    """A file of JSON lines.

    Written with ``os.write`` to a file opened for appending, so that a forked process has nothing to flush.

    Args:
        path: The file; its folder must be there.
        fresh: Whether to begin it anew.
        sample: Called from the thread that writes, every other second; what it returns is written, too.

    Attributes:
        error: Why nothing is written any more; None if all is well.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, fresh: bool, sample: Callable[[], dict[str, Any]] | None = None) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot record the run in {path}: {error.strerror}.\nName another folder (--run-dir DIR)."
            ) from error
        self._path = path
        self._lines: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        self._sample = sample
        self._over = threading.Event()
        self._is_cut = not fresh and not _ends_in_newline(path)
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-recorder", daemon=True)
        self._thread.start()

    def add(self, line: dict[str, Any]) -> None:
        """Have ``line`` written soon. Does not block."""
        self._lines.append(line)

    def close(self) -> None:
        """Write what is left, and close the file. Blocks some seconds at most."""
        self._over.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._file)

    def _run(self) -> None:
        is_over = False
        num_rounds = 0
        while not is_over:
            is_over = self._over.wait(FLUSH_S if num_rounds else 0.05)  # the first lines soon: a run may be short
            if self._sample is not None and (num_rounds % 2 == 0 or is_over):
                with contextlib.suppress(Exception):  # figures of a machine that does not tell them
                    self._lines.append(self._sample())
            num_rounds += 1
            self._flush()

    def _flush(self) -> None:
        texts = []
        while self._lines:
            texts.append(to_line(self._lines.popleft()))
        if not texts or self.error is not None:
            return
        data = ("\n" * self._is_cut + "".join(texts)).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
                self._is_cut = False
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"


def to_line(line: dict[str, Any]) -> str:
    """Return ``line`` as one line of JSON; NaN and infinities, which JSON does not have, become strings."""
    try:
        return json.dumps(line, separators=_COMPACT, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_named(line), separators=_COMPACT) + "\n"


def _named(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(entry) for entry in value]
    return value


def _ends_in_newline(path: Path) -> bool:
    """Return whether a file that was written before ends with a whole line; a killed process may leave a part."""
    size = path.stat().st_size
    if not size:
        return True
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"
