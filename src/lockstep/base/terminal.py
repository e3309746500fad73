"""The terminal that rank zero's live view and the launcher's lines share. Standard library only."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

# The environment variable that names the launcher's terminal to the ranks; rank zero draws its live view there.
TERMINAL = "LOCKSTEP_TERMINAL"

_LOCK_S = 0.5


def lock_file(file: int, wait_s: float) -> bool:
    """Lock a file for this process; return whether nobody else has had the lock for so long."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        except OSError:  # a file system without locks
            return True


class TerminalRegion:
    """The rows of the terminal that the live view occupies, shared by its two writers.

    The cursor stays at the start of the row below the view, so a writer that is killed leaves a clean prompt. Before
    the launcher prints, it erases the view; rank zero draws it again at its next refresh.

    Args:
        folder: The launcher's.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / "terminal", "a+")  # noqa: SIM115 - stays open as long as the process

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Yield the number of rows of the view, locked against changes; -1 while a line is unfinished.

        Blocks half a second at most: a rank that is stopped (SIGSTOP) during a refresh must not block the
        launcher.
        """
        is_locked = lock_file(self._file.fileno(), _LOCK_S)
        try:
            self._file.seek(0)
            yield int(self._file.read() or 0)
        finally:
            if is_locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def set_rows(self, rows: int) -> None:
        """Set how many rows the view takes from now on; called inside `locked`."""
        with contextlib.suppress(OSError):  # the disk is full
            self._file.truncate(0)
            print(rows, file=self._file, flush=True)


def erase_rows(rows: int) -> str:
    """Return the escape codes that erase this number of rows above the cursor, and move the cursor to the first."""
    return f"\r\x1b[{rows}A\x1b[J" if rows > 0 else ""
