"""A folder with a short name for the sockets over which loader processes hand over tensors.

[Note: why]
A tensor travels as an open file, for which the loader process listens on a socket in a folder that `multiprocessing`
makes below that for temporary files. A socket's path must not be longer than 107 bytes. If it would be, the error is
printed by a thread that nobody waits for, and the rank waits for its first batch for ever. Newer versions of Python
see to it themselves.
"""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile

from lockstep.errors import ConfigurationError

_MOST_BYTES = 107
_FOLDER, _SOCKET = "/pymp-xxxxxxxx", "/listener-xxxxxxxx"
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def is_too_long(folder: str) -> bool:
    """Return whether sockets of loader processes cannot be made below ``folder`` for temporary files."""
    return not hasattr(multiprocessing.util, "_SUN_PATH_MAX") and _bytes(folder + _FOLDER) > _MOST_BYTES


def make_sockets_possible(rather: str | None = None) -> None:
    """Have this process and its children make their sockets where their names are short enough.

    Other temporary files stay where they are. Does nothing if names are short enough.

    Args:
        rather: A folder that is taken if its own name is short enough.

    Raises:
        ConfigurationError: There is no such folder that can be written to, or it is too late for another.
    """
    folder = tempfile.gettempdir()
    if not is_too_long(folder):
        return
    short = next(filter(_is_fit, [*([] if rather is None else [rather]), *_SHORT]), None)
    if short is not None:
        tempfile.tempdir = short
        try:
            made = multiprocessing.util.get_temp_dir()  # the one that there is, if there is one
        finally:
            tempfile.tempdir = folder
        if _bytes(made) <= _MOST_BYTES:
            return
    raise ConfigurationError(
        f"The folder for temporary files has too long a name for loader processes, which hand tensors over by sockets "
        f"in it: {folder}\nName a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
    )


def _is_fit(folder: str) -> bool:
    return not is_too_long(folder) and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def _bytes(folder: str) -> int:
    return len(os.fsencode(folder + _SOCKET))
