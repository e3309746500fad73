"""A checkpoint's folder: files with checksums, and a manifest, written last, that names those that count.

The files of a save have names of their own, so that those of the one before stay as they are until the new manifest
takes the place of the old one in one rename. Whatever is interrupted before that leaves the old checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.train.checkpoint import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "lockstep checkpoint 1"
_LOCK = "lock"
_MAX_MANIFEST_BYTES = 1 << 16
_OURS = re.compile(r"(state|tensors)-[0-9a-f]{16}\.(json|safetensors)|manifest-[0-9a-f]{16}\.tmp")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make ``files``, by name such as ``state.json``, the content of the checkpoint ``folder``.

    Blocks until they are on disk.

    Raises:
        CheckpointError: Another process is writing to the folder.
        OSError: It cannot be written; the checkpoint that was there is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _remove_all_but(folder, _named_by_manifest(folder))
        token = secrets.token_hex(8)
        entries: dict[str, Any] = {}
        for name, content in files.items():
            stem, _, ending = name.partition(".")
            own = f"{stem}-{token}.{ending}"
            _write(folder / own, content)
            entries[name] = {"file": own, "bytes": len(content), "blake2b": _checksum(content)}
        body = json.dumps({"format": FORMAT, "files": entries})
        temporary = folder / f"manifest-{token}.tmp"
        _write(temporary, f"{_checksum(body.encode())}\n{body}\n".encode())
        _sync_folder(folder)
        temporary.replace(folder / MANIFEST)
        _sync_folder(folder)
        _sync_folder(folder.parent)
        _remove_all_but(folder, {entry["file"] for entry in entries.values()})


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of the checkpoint ``folder``, by name, each as it was written.

    Raises:
        CheckpointError: There is none, or it is damaged; names the file.
    """
    path = folder / MANIFEST
    entries = _entries(path, _read(path, None))
    files = {}
    for name, entry in entries.items():
        path = folder / entry["file"]
        content = _read(path, entry["bytes"])
        if _checksum(content) != entry["blake2b"]:
            raise CheckpointError(broken(path, "does not match its checksum"))
        files[name] = content
    return files


def broken(path: Path, why: str) -> str:
    """Return the message that the checkpoint's file ``path`` is not what was written."""
    return f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one."


def _entries(path: Path, content: bytes) -> dict[str, Any]:
    checksum, _, body = content.partition(b"\n")
    body = body.removesuffix(b"\n")
    if checksum != _checksum(body).encode():
        raise CheckpointError(broken(path, "does not match its checksum"))
    try:
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            raise CheckpointError(broken(path, f"is not of the format {FORMAT!r}"))
        entries: dict[str, Any] = manifest["files"]
        well_formed = all(
            _OURS.fullmatch(entry["file"]) and type(entry["bytes"]) is int and type(entry["blake2b"]) is str
            for entry in entries.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        well_formed = False
    if not well_formed:  # also names that point out of the folder
        raise CheckpointError(broken(path, "is not of the form that Lockstep writes"))
    return entries


def _read(path: Path, num_bytes: int | None) -> bytes:
    """Return the content of a file that is really one, of ``num_bytes`` if that is known."""
    try:
        # No link out of the folder, and no waiting for whoever writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if num_bytes is None:
            raise CheckpointError(
                f"There is no checkpoint {path.parent}.\nIt must be a folder that every rank sees."
            ) from None
        raise CheckpointError(broken(path, "is not there")) from None
    except OSError as error:
        raise CheckpointError(broken(path, f"cannot be read: {error.strerror}")) from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(broken(path, "is not a file"))
        if num_bytes is None and found.st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(broken(path, f"has {found.st_size} bytes, more than {_MAX_MANIFEST_BYTES}"))
        if num_bytes is not None and found.st_size != num_bytes:
            raise CheckpointError(broken(path, f"has {found.st_size} bytes, not {num_bytes}"))
        try:
            return file.read()
        except OSError as error:
            raise CheckpointError(broken(path, f"cannot be read: {error.strerror}")) from error


def _named_by_manifest(folder: Path) -> set[str]:
    path = folder / MANIFEST
    try:
        return {entry["file"] for entry in _entries(path, _read(path, None)).values()}
    except CheckpointError:
        return set()  # nothing there can be loaded, so nothing is to be kept


def _remove_all_but(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer; the lock goes with the process, however it ends."""
    with open(folder / _LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another process is writing the checkpoint {folder}.\nGive each run a folder of its own."
            ) from None
        yield
