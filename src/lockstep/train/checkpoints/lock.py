"""One writer at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from io import FileIO
from pathlib import Path

from lockstep.errors import CheckpointError

_NAME = "lock"
_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems without locks answer."""
_held: set[str] = set()
"""By this process, whose own locks the system would grant twice."""


class FolderLock:
    """Holds a folder until `release`, or until the process ends, however it does; forked children do not hold it.

    Where the file system knows no locks, only this process is kept from holding it twice.

    Raises:
        CheckpointError: Somebody else holds it.
        OSError: The lock's file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._name = os.path.realpath(folder)
        if self._name in _held:
            raise _taken(folder)
        self._file = FileIO(folder / _NAME, "ab")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                self._file.close()
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _taken(folder) from None
                raise
        _held.add(self._name)

    def release(self) -> None:
        """Let others have the folder; again has no effect."""
        if not self._file.closed:
            self._file.close()
            _held.discard(self._name)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _taken(folder: Path) -> CheckpointError:
    return CheckpointError(f"Another process is writing the checkpoint {folder}.\nGive each run a folder of its own.")
