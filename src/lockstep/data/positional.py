"""Reads at given places of files, for data sets that are larger than memory.

Each piece is asked for with ``pread`` rather than mapped into memory: mapped pages count as the process's own
memory until the system takes them back, and a file that became shorter would end the process with SIGBUS, where here
it is an error that can be told. ``pread`` has no position, so threads and forked processes can share a descriptor.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict

from lockstep.errors import DataError


def _most_open() -> int:
    """Return how many files a reader may keep open: a quarter of what the system allows this process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // 4))


_MAX_OPEN = _most_open()


class _Descriptor:
    """An open file that closes itself once nobody reads from it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class PositionalReader:
    """Reads pieces of any number of files; opens each when it is first needed, in each process anew if pickled.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()

    def read(self, path: str, offset: int, size: int, *, what: str, sample: int | str | None = None) -> bytes:
        """Return ``size`` bytes of the file from ``offset`` on. Blocks until they are there.

        Args:
            path: The file.
            offset: In bytes.
            size: In bytes.
            what: What the bytes are, for errors: ``sample 7``.
            sample: The same for programs.

        Raises:
            DataError: The file cannot be opened or read, or ends before; names the file, the place and ``what``.
        """
        try:
            descriptor = self._open.get(path) or self._add(path)
            pieces = []
            missing = size
            while missing:
                piece = os.pread(descriptor.number, missing, offset + size - missing)
                if not piece:
                    break
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            cause = f"{path} cannot be read at byte {offset}, for {what}: {error.strerror}."
            advice = "Check that the file is still there, and that this machine sees it."
            raise DataError(f"{cause}\n{advice}", file=path, offset=offset, sample=sample) from error
        if missing:
            cause = (
                f"{path} ends at byte {offset + size - missing}, but {what} lies at bytes {offset} to {offset + size}."
            )
            advice = "The file was cut short after the data set was made. Restore it and resume."
            raise DataError(f"{cause}\n{advice}", file=path, offset=offset, sample=sample)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _add(self, path: str) -> _Descriptor:
        descriptor = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if len(self._open) >= _MAX_OPEN:  # a thread that reads from the oldest still holds it
            self._open.popitem(last=False)
        self._open[path] = descriptor
        return descriptor

    def __getstate__(self) -> dict[str, object]:
        return {"_open": OrderedDict()}


def size_of(path: str) -> int:
    """Return the bytes of a file.

    Raises:
        DataError: It is not there, is a folder, or must not be read.
    """
    try:
        status = os.stat(path)
        if os.path.isdir(path):
            raise DataError(f"{path} is a folder.\nName the files in it, as with {path}/*.", file=path)
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} must not be read by this user.\nChange its permissions.", file=path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.\nCheck the name, and that this machine sees it.", file=path) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.\nCheck the file system.", file=path) from error
    return status.st_size
