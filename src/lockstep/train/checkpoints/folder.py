"""A checkpoint's folder: files with checksums, and a manifest, written last, that names those that count.

The files of a save have names of their own, so that those of the one before stay as they are until the new manifest
takes the place of the old one in one rename. Whatever is interrupted before that leaves the old checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.train.checkpoints import disk
from lockstep.train.checkpoints.tensors import Pieces

MANIFEST = "manifest.json"
FORMAT = "lockstep checkpoint 1"
_MAX_MANIFEST_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22
_MAX_REPLACED = 5
"""So often may a save replace a checkpoint while it is read."""
_OURS = re.compile(r"(state|tensors)-[0-9a-f]{16}\.(json|safetensors)|manifest-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder says of itself.

    Attributes:
        entries: Of each file, by its name: ``file``, ``bytes`` and ``blake2b``.
        about: What the writer added.
        checksum: Of the manifest, which tells this checkpoint from all others.
    """

    entries: Mapping[str, Any]
    about: Mapping[str, Any]
    checksum: str


def write_folder(folder: Path, files: Mapping[str, Pieces], about: Mapping[str, Any] | None = None) -> None:
    """Make ``files``, by name such as ``state.json``, the content of the checkpoint ``folder``.

    Blocks until they are on disk. Only one process may do so at a time.

    Args:
        folder: Made if it is not there.
        files: The content of each, in pieces.
        about: Small numbers and strings for the manifest.

    Raises:
        OSError: It cannot be written; the checkpoint that was there is as it was.
    """
    disk.make_folder(folder)
    _remove_leftovers(folder)
    token = secrets.token_hex(8)
    entries: dict[str, Any] = {}
    for name, content in files.items():
        stem, _, ending = name.partition(".")
        own = f"{stem}-{token}.{ending}"
        num_bytes, checksum = _write(folder / own, content)
        entries[name] = {"file": own, "bytes": num_bytes, "blake2b": checksum}
    body = json.dumps({"format": FORMAT, "files": entries, "about": dict(about or {})}).encode()
    temporary = folder / f"manifest-{token}.tmp"
    _write(temporary, [f"{_checksum(body)}\n".encode() + body + b"\n"])
    disk.flush_folder(folder)
    disk.rename(temporary, folder / MANIFEST)
    disk.flush_folder(folder)
    disk.flush_folder(folder.parent)
    _remove_all_but(folder, {entry["file"] for entry in entries.values()})


def read_folder(folder: Path) -> tuple[dict[str, bytes], Manifest]:
    """Return the files of the checkpoint ``folder``, by name, each as it was written, and its manifest.

    Raises:
        CheckpointError: There is none, or it is damaged; names the file.
    """
    manifest = read_manifest(folder)
    for _ in range(_MAX_REPLACED):
        try:
            return {name: _read_checked(folder, entry) for name, entry in manifest.entries.items()}, manifest
        except CheckpointError:
            now = read_manifest(folder)
            if now.checksum == manifest.checksum:
                raise
            manifest = now  # a save has replaced the checkpoint meanwhile, and removed the files of the one before
    raise CheckpointError(f"The checkpoint {folder} is replaced faster than it can be read.\nTry again.")


def read_manifest(folder: Path) -> Manifest:
    """Return what ``folder`` says of itself, without looking at its files.

    Raises:
        CheckpointError: There is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    content = _read(path, None)
    checksum, _, body = content.partition(b"\n")
    body = body.removesuffix(b"\n")
    if checksum != _checksum(body).encode():
        raise CheckpointError(broken(path, "does not match its checksum"))
    try:
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            raise CheckpointError(broken(path, f"is not of the format {FORMAT!r}"))
        entries: dict[str, Any] = manifest["files"]
        about = manifest.get("about", {})
        well_formed = type(about) is dict and all(
            _OURS.fullmatch(entry["file"]) and type(entry["bytes"]) is int and type(entry["blake2b"]) is str
            for entry in entries.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        well_formed = False
    if not well_formed:  # also names that point out of the folder
        raise CheckpointError(broken(path, "is not of the form that Lockstep writes"))
    return Manifest(entries, about, checksum.decode())


def broken(path: Path, why: str) -> str:
    """Return the message that the checkpoint's file ``path`` is not what was written."""
    return f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one."


def _read_checked(folder: Path, entry: Mapping[str, Any]) -> bytes:
    path = folder / entry["file"]
    content = _read(path, entry["bytes"])
    if _checksum(content) != entry["blake2b"]:
        raise CheckpointError(broken(path, "does not match its checksum"))
    return content


def _read(path: Path, num_bytes: int | None) -> bytes:
    """Return the content of a file that is really one, of ``num_bytes`` if that is known."""
    try:
        # No link out of the folder, and no waiting for whoever writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if num_bytes is None and not _has_files(path.parent):
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


def _has_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(_OURS.fullmatch(path.name) for path in folder.iterdir())
    return False


def _remove_leftovers(folder: Path) -> None:
    """Remove the files of saves that were not finished, if it is known which these are."""
    # A manifest that cannot be read now may be one that can be read later, or by a later version: then nothing is.
    with contextlib.suppress(CheckpointError):
        named = read_manifest(folder) if (folder / MANIFEST).exists() else None
        _remove_all_but(folder, set() if named is None else {entry["file"] for entry in named.entries.values()})


def _remove_all_but(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            disk.remove(path)


def _write(path: Path, content: Pieces) -> tuple[int, str]:
    """Write a file; return its size in bytes and its checksum."""
    digest, num_bytes = hashlib.blake2b(digest_size=32), 0
    with disk.create(path) as file:
        for piece in content:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                disk.write(file, chunk)
                num_bytes += len(chunk)
        disk.flush(file)
    return num_bytes, digest.hexdigest()


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
