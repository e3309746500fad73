"""Checkpoints in object stores, such as ``s3://bucket/run``: objects by fsspec, and a lease that is their lock.

[Note: object stores]
An object is there in whole or not at all, and from then on everybody sees it: S3, GCS and Azure promise that. There are
no folders, no renames, and no locks that end with their process. So a save writes its objects under the checkpoint's
own name, where each has the token of the save in its name; and the manifest, a single object, makes them the
checkpoint, or takes the place of the manifest of the one before. What has the name of a checkpoint but no manifest is
of a save that did not come to its end: it counts as nothing, and the next save removes it.

DCP's ``FsspecWriter`` is not used: it pickles, has no digests, and renames its metadata into place.
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

from lockstep.comm.hierarchy import machine_id
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.launcher.reaper import start_time

# Seconds between two renewals of a lease, and without one until somebody else may take it.
RENEW_S, LEASE_S = 10.0, 40.0

_POLL_S = 1.0
_LEASE = re.compile(r"lock-(\d{10})")
_RELEASED = b"released"

# What is read ahead of what was asked for: a request costs as much time as some MiB.
_BLOCK_BYTES = 1 << 24

_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True)
class ObjectPath:
    """A place in an object store: as much of `pathlib.Path` as checkpoints need. What is read is never a cached state.

    Args:
        url: Such as ``s3://bucket/run``.
        store: fsspec's file system.
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
        """Do nothing: there are no folders. A bucket that is not there is an error of the first write."""

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield what is one level below; nothing, if there is nothing."""
        self.store.invalidate_cache()  # other processes write as well
        own = self.store._strip_protocol(self.url)
        with suppress(FileNotFoundError):
            for path in self.store.ls(self.url, detail=False):
                if path.rstrip("/") != own:  # an object, or an empty one that stands for the folder
                    yield self / path.rstrip("/").rpartition("/")[2]

    def exists(self) -> bool:
        """Return whether there is such an object, or something below."""
        # By a listing: the ``exists`` of fsspec takes any error for a no.
        return any(each.name == self.name for each in self.parent.iterdir())

    def open(self, mode: str) -> BinaryIO:
        """Open for ``rb``, or for ``wb``: the object is there once the file is closed."""
        how = {"block_size": _BLOCK_BYTES} if mode == "rb" else {}
        self.store.invalidate_cache()
        return cast(BinaryIO, self.store.open(self.url, mode, **how))

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the content, or a range of it, which may end behind its end."""
        return bytes(self.store.cat_file(self.url, start=start, end=stop))

    def write_bytes(self, content: bytes, *, exclusive: bool = False) -> None:
        """Make this object in one request.

        Raises:
            FileExistsError: ``exclusive``, and it is there; if two processes try at once, one of them gets this.
        """
        self.store.pipe_file(self.url, content, **({"mode": "create"} if exclusive else {}))

    def touch(self) -> None:
        """Make an object without much content."""
        self.write_bytes(b"\n")  # some stores take an empty object for a folder

    def unlink(self, *, missing_ok: bool = True) -> None:
        """Remove the object, if it is there."""
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
    """Return the folder, or the place in an object store, that ``path`` names.

    Raises:
        ConfigurationError: It is a URL that cannot be used, such as of a store that no installed package knows.
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
    try:
        from fsspec.core import url_to_fs

        return ObjectPath(text.rstrip("/"), url_to_fs(text)[0])
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{text} is in an object store that cannot be used here: {error}.\n"
            "Install its package on every machine, such as s3fs for s3:// or gcsfs for gs://."
        ) from error


class Lease:
    """The right to write below a place in an object store, until it is closed; or this process ends, and a while after.

    [Note: leases]
    Objects ``lock-N`` are leases, of which the highest N counts. Its holder writes it anew every `RENEW_S`. Who wants
    it watches it: if it stays as it is for `LEASE_S`, or its process is known to be gone, the next number is created,
    exclusively, so that one of several gets it. Clocks of machines are not compared. A holder that was stopped for so
    long finds the higher number: at its next renewal, and before it makes a checkpoint (`check`). What is left is the
    moment between that and the manifest, and stores that cannot create exclusively, where two that begin within the
    same moment find out at the next renewal. A save of both at once can then lose a checkpoint, but not mix two: their
    objects have different tokens.

    Args:
        folder: Where.
    """

    def __init__(self, folder: ObjectPath) -> None:
        self._folder, self._number, self._num_renewals = folder, 0, 0
        self._token = secrets.token_hex(8)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lockstep-lease", daemon=True)

    def take(self) -> bool:
        """Return whether this process has the lease now. Blocks up to `LEASE_S`, until another one has renewed it."""
        found, since = self._newest(), time.monotonic()
        while not _is_free(found[1]) and time.monotonic() - since < LEASE_S:
            time.sleep(min(_POLL_S, RENEW_S))
            now = self._newest()
            if now != found and not _is_free(now[1]):
                return False
            found = now
        self._number = found[0] + 1
        try:
            self._place.write_bytes(self._content(), exclusive=True)
            self.check()  # some stores do not know exclusive writes
        except (FileExistsError, CheckpointError):
            return False
        for number in self._numbers():
            if number < self._number:
                self._place_of(number).unlink(missing_ok=True)
        self._thread.start()
        return True

    def check(self) -> None:
        """Check that nobody else has taken the lease.

        Raises:
            CheckpointError: Somebody has.
        """
        number, content = self._newest()
        if number != self._number or self._token.encode() not in content:
            raise CheckpointError(
                f"Another process has taken over the checkpoint {self._folder}, as this one had not renewed its lease "
                f"for {LEASE_S:g} s.\nGive each run a place of its own."
            )

    def close(self) -> None:
        """Let others have it at once. Blocks for some requests."""
        self._closed.set()
        self._thread.join(LEASE_S)
        with suppress(Exception):  # then it ends by itself
            self.check()
            self._place.write_bytes(_RELEASED)

    @property
    def _place(self) -> ObjectPath:
        return self._place_of(self._number)

    def _place_of(self, number: int) -> ObjectPath:
        return self._folder / f"lock-{number:010d}"

    def _numbers(self) -> list[int]:
        return [int(match[1]) for each in self._folder.iterdir() if (match := _LEASE.fullmatch(each.name))]

    def _newest(self) -> tuple[int, bytes]:
        """Return the number and content of the lease that counts; 0 if there has been none."""
        while number := max(self._numbers(), default=0):
            with suppress(FileNotFoundError):  # removed by who has just taken the next one
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
                self._place.write_bytes(self._content())
            except CheckpointError:
                return  # the next save finds out as well
            except Exception:
                continue


def _is_free(content: bytes) -> bool:
    """Return whether a lease was released, or is of a process of this machine that is gone."""
    if content == _RELEASED:
        return True
    with suppress(ValueError, LookupError, TypeError):  # not written by this version: it is watched
        machine, pid, started = json.loads(content)["process"]
        return bool(machine == machine_id() and started is not None and start_time(pid) != started)
    return False
