"""The last rows of a terminal, drawn anew in place, while all that is printed appears above them.

[Note: a clean terminal]
The cursor always rests at the start of the row below the region, is never hidden, and every line ends in plain colours:
so whenever the process is killed, the next prompt stands below the last state of the view, and nothing has to be put
right. To draw anew, the cursor goes up by the rows that the lines take in the present width, for terminals break long
lines anew when they become narrow. A line that is begun and not ended, such as a prompt, has the last row to itself:
until it is ended, there is no region.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

_PAUSE_S = 0.1
"""Between two drawings for the sake of what is printed; with more printing than that, the region waits."""

_active: Region | None = None


class Region:
    """Takes over standard output and error, as far as they are this terminal, until it is closed.

    Safe to use from several threads; `note` also from a signal handler.

    Args:
        file: The terminal.
    """

    def __init__(self, file: TextIO) -> None:
        global _active
        self._file = file
        self._console = Console(file=file)
        self._lock = threading.RLock()
        self._lines: list[tuple[str, int]] = []  # with their widths in cells
        self._cells: list[int] = []  # of the lines that are on the terminal now
        self._num_foreign_rows = 0
        self._is_open_line = self._is_closed = False
        self._drawn_at_s = 0.0
        self._notes: deque[str] = deque()
        self._before = sys.stdout, sys.stderr
        self._ours = tuple(cast(TextIO, _Above(self, stream)) if stream.isatty() else stream for stream in self._before)
        sys.stdout, sys.stderr = self._ours
        _active = self

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the terminal, as it is now."""
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(self._file.fileno())
            if columns and rows:
                return columns, rows
        return 80, 25

    def show(self, lines: Sequence[Text]) -> None:
        """Show ``lines``, none of which may be wider than the terminal, instead of those before."""
        encoded = [(self._encode(line), line.cell_len) for line in lines]
        with self._lock:
            if not self._is_closed:
                self._flush()
                self._lines = encoded
                self._put(self._erasing() + self._take_notes() + self._drawing())

    def write(self, target: TextIO, text: str) -> int:
        """Write ``text`` to one of the streams that were taken over, above the region."""
        with self._lock:
            if not text:
                return 0
            if self._cells:
                self._put(self._erasing())
            self._is_open_line = not text.endswith("\n")
            written = target.write(text)
            if self._lines and time.monotonic() - self._drawn_at_s > _PAUSE_S:
                self.refresh()
            return written

    def refresh(self) -> None:
        """Draw the lines again if they are not there, and what was noted."""
        with self._lock:
            if not self._is_closed and (self._notes or (self._lines and not self._cells)):
                self._flush()
                self._put(self._erasing() + self._take_notes() + self._drawing())

    def note(self, text: str) -> None:
        """Have whole lines printed soon. Takes no lock: for signal handlers."""
        self._notes.append(text)

    def disturbed(self, text: str) -> None:
        """Take notice that another process has written whole lines below the region; they are printed again above."""
        with self._lock:
            if self._cells:
                self._num_foreign_rows += text.count("\n")
                self._notes.append(text)

    def close(self) -> None:
        """Leave the terminal as if there had been no region, and give the streams back."""
        global _active
        with self._lock:
            if self._is_closed:
                return
            self._flush()
            self._put(self._erasing() + self._take_notes())
            self._is_closed = True
            self._lines = []
        if _active is self:
            _active = None
        self._give_back()

    def abandon(self) -> None:
        """In a forked child: leave the terminal to the parent."""
        self._lock = threading.RLock()  # the parent's other thread may have held it
        self._is_closed, self._lines, self._cells = True, [], []
        self._give_back()

    def _give_back(self) -> None:
        """Put the streams back. What somebody else has put there meanwhile stays; ours pass on what they are given."""
        if sys.stdout is self._ours[0]:
            sys.stdout = self._before[0]
        if sys.stderr is self._ours[1]:
            sys.stderr = self._before[1]

    def _encode(self, line: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(line, no_wrap=True, overflow="ignore", crop=False, end="", highlight=False)
        return capture.get()

    def _erasing(self) -> str:
        """Return what takes the region off the terminal; see [Note: a clean terminal]."""
        if not self._cells:
            return ""
        columns = self.size[0]
        rows = sum(max(1, -(-cells // columns)) for cells in self._cells) + self._num_foreign_rows
        self._cells, self._num_foreign_rows = [], 0
        return f"\r\x1b[{rows}A\x1b[J"

    def _drawing(self) -> str:
        """Return what puts it there."""
        if self._is_open_line or not self._lines:
            return ""
        self._cells, self._drawn_at_s = [cells for _, cells in self._lines], time.monotonic()
        return "".join(f"{line}\n" for line, _ in self._lines)

    def _take_notes(self) -> str:
        text = ""
        while self._notes:
            text += self._notes.popleft()
        if text and self._is_open_line:
            self._is_open_line = False
            return f"\n{text}"
        return text

    def _flush(self) -> None:
        for stream in self._before:
            with suppress(OSError, ValueError):
                stream.flush()

    def _put(self, text: str) -> None:
        if text:
            with suppress(OSError, ValueError):  # the terminal is gone
                try:
                    self._file.write(text)
                except UnicodeEncodeError:
                    self._file.write(text.encode(self._file.encoding, "replace").decode(self._file.encoding))
                self._file.flush()


class _Above:
    """A stream whose text appears above a region; for all else it is the stream itself."""

    def __init__(self, region: Region, target: TextIO) -> None:
        self._region, self._target = region, target

    def write(self, text: str) -> int:
        return self._region.write(self._target, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def say_at_once(text: bytes) -> None:
    """Write whole lines to standard error from a signal handler: above the region, if there is one."""
    region = _active
    if region is None:
        os.write(2, text)
    else:
        region.note(text.decode())


def _after_fork() -> None:
    global _active
    if _active is not None:
        _active.abandon()
        _active = None


os.register_at_fork(after_in_child=_after_fork)
