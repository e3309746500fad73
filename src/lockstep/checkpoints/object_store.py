"""Checkpoints in object stores, such as ``s3://bucket/run``: access by fsspec, and a lease that serves as a lock.

[Note: object stores]
S3, GCS and Azure guarantee that an object is either complete and visible to everybody, or absent. They have no folders,
no renames, and no locks that end with their process. A save writes its objects under the name of the checkpoint, each
with the token of the save in its name. The manifest, a single object, then turns them into the checkpoint, or replaces
the manifest of the previous one. Objects under the name of a checkpoint without a manifest belong to a save that was
interrupted: they are ignored, and the next save removes them.

DCP's ``FsspecWriter`` is not used: it pickles, has no digests, and renames its metadata.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep.base.env import file_system_of
from lockstep.comm.hierarchy import machine_id
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.launcher.reaper import start_time

# Seconds between two renewals of a lease, and seconds without a renewal after which another process may take it.
RENEW_S, LEASE_S = 10.0, 40.0

_POLL_S = 1.0
_LEASE = re.compile(r"lock-(\d{10})")
_RELEASED = b"released"

# Number of bytes read ahead: a request takes as long as the transfer of some MiB.
_BLOCK_BYTES = 1 << 24

_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True)
class ObjectPath:
    """A path in an object store, with the methods of `pathlib.Path` that checkpoints need. Listings are never cached.

    Args:
        url: The URL, such as ``s3://bucket/run``.
        store: The file system of fsspec.
    """

    url: str
    store: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}", self.store)

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """Without the last part."""
        return ObjectPath(self.url.rpartition("/")[0], self.store)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: there are no folders. If the bucket does not exist, the first write fails."""

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the paths one level below."""
        self.store.invalidate_cache()  # other processes write as well
        from fsspec.core import strip_protocol

        folder = strip_protocol(self.url)
        with suppress(FileNotFoundError):
            for path in self.store.ls(self.url, detail=False):
                if path.rstrip("/") != folder:  # the object itself, or an empty object that represents the folder
                    yield self / path.rstrip("/").rpartition("/")[2]

    def exists(self) -> bool:
        """Return whether there is such an object, or any object below."""
        # By a listing: fsspec's ``exists`` returns False after any error.
        return any(path.name == self.name for path in self.parent.iterdir())

    def open(self, mode: str) -> BinaryIO:
        """Open in mode ``rb`` or ``wb``. A written object becomes visible when the file is closed."""
        options = {"block_size": _BLOCK_BYTES} if mode == "rb" else {}
        self.store.invalidate_cache()
        return cast(BinaryIO, self.store.open(self.url, mode, **options))

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the content, or a range of it; the range may extend beyond the end."""
        return bytes(self.store.cat_file(self.url, start=start, end=stop))

    def write_bytes(self, content: bytes, *, exclusive: bool = False) -> None:
        """Write this object in one request.

        Raises:
            FileExistsError: ``exclusive``, and it exists. If two processes try at once, one of them gets this error.
        """
        self.store.pipe_file(self.url, content, **({"mode": "create"} if exclusive else {}))

    def unlink(self, *, missing_ok: bool = True) -> None:
        """Remove the object, if it exists."""
        with suppress(FileNotFoundError):
            self.store.rm_file(self.url)

    def remove_all(self) -> None:
        """Remove all objects below."""
        self.store.invalidate_cache()
        with suppress(FileNotFoundError):
            self.store.rm(self.url, recursive=True)


# Where checkpoints can be.
Place = Path | ObjectPath


def place_of(path: str | os.PathLike[str] | Place) -> Place:
    """Return the folder, or the path in an object store, that ``path`` names.

    Raises:
        ConfigurationError: It is a URL that cannot be used, for example because the package for it is not installed.
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    if _LOST_SLASH.match(text):
        raise ConfigurationError(f"{text} is a URL without its second slash, which pathlib.Path removes.\nGive a str.")
    protocol, separator, rest = text.partition("://")
    if protocol in ("file", "local"):
        return Path(rest)
    if not separator:
        return Path(text)
    return ObjectPath(text.rstrip("/"), file_system_of(text))


class Lease:
    """The right to write below a path in an object store. It ends with `close`, or `LEASE_S` after this process ends.

    [Note: leases]
    Objects ``lock-N`` are leases. The one with the highest N is valid. Its holder rewrites it every `RENEW_S`. A
    process that wants the lease polls it. If it has not changed for `LEASE_S`, or the process of its holder has ended,
    the next number is created exclusively, so that only one process gets it. Clocks of machines are not compared. A
    holder that was stopped for longer than `LEASE_S` finds the higher number at its next renewal, and before it commits
    a checkpoint (`check`). Two cases are not covered: the moment between this check and the manifest, and stores
    without exclusive creation, where two processes that start at the same moment notice each other only at the next
    renewal. If both then save at once, a checkpoint can be lost, but two are never mixed: their objects have different
    tokens.

    Args:
        folder: The path that it protects.
    """

    def __init__(self, folder: ObjectPath) -> None:
        self._folder, self._number, self._num_renewals = folder, 0, 0
        self._token = secrets.token_hex(8)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lockstep-lease", daemon=True)

    def take(self) -> bool:
        """Try to get the lease; return whether this process has it. Blocks until it is known, at most `LEASE_S`."""
        newest, since = self._newest(), time.monotonic()
        while not _is_free(newest[1]) and time.monotonic() - since < LEASE_S:
            time.sleep(min(_POLL_S, RENEW_S))
            now = self._newest()
            if now != newest and not _is_free(now[1]):
                return False
            newest = now
        self._number = newest[0] + 1
        try:
            self._place_of(self._number).write_bytes(self._content(), exclusive=True)
            self.check()  # some stores do not support exclusive writes
        except (FileExistsError, CheckpointError):
            return False
        for number in self._numbers():
            if number < self._number:
                self._place_of(number).unlink(missing_ok=True)
        self._thread.start()
        return True

    def check(self) -> None:
        """Check that no other process has taken the lease.

        Raises:
            CheckpointError: Another process has taken it.
        """
        number, content = self._newest()
        if number != self._number or self._token.encode() not in content:
            raise CheckpointError(
                f"Another process has taken over the checkpoint {self._folder}, because this process had not renewed "
                f"its lease for {LEASE_S:g} s.\nUse a separate folder for each run."
            )

    def close(self) -> None:
        """Release the lease. Blocks for some requests."""
        self._closed.set()
        self._thread.join(LEASE_S)
        with suppress(Exception):  # then it expires
            self.check()
            self._place_of(self._number).write_bytes(_RELEASED)

    def _place_of(self, number: int) -> ObjectPath:
        return self._folder / f"lock-{number:010d}"

    def _numbers(self) -> list[int]:
        return [int(match[1]) for path in self._folder.iterdir() if (match := _LEASE.fullmatch(path.name))]

    def _newest(self) -> tuple[int, bytes]:
        """Return the number and content of the valid lease; number 0 if there is none."""
        while number := max(self._numbers(), default=0):
            with suppress(FileNotFoundError):  # removed by the process that has just taken the next one
                return number, self._place_of(number).read_bytes()
        return 0, _RELEASED

    def _content(self) -> bytes:
        process = [machine_id(), os.getpid(), start_time(os.getpid())]
        return json.dumps({"token": self._token, "process": process, "renewals": self._num_renewals}).encode()

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_S):
            try:
                self.check()
                self._num_renewals += 1
                self._place_of(self._number).write_bytes(self._content())
            except CheckpointError:
                return  # the next save raises the same error
            except Exception:
                continue


def _is_free(content: bytes) -> bool:
    """Return whether a lease was released, or belongs to a process of this machine that has ended."""
    if content == _RELEASED:
        return True
    with suppress(ValueError, LookupError, TypeError):  # written by another version: it has to expire
        machine, pid, started = json.loads(content)["process"]
        return bool(machine == machine_id() and started is not None and start_time(pid) != started)
    return False
