"""What a tar shard holds and where, from its headers alone: the members of each sample, in the WebDataset layout.

Members whose path is the same up to the first dot of the file name are the fields of one sample: ``a/0001.jpg`` and
``a/0001.seg.png`` are ``jpg`` and ``seg.png`` of ``a/0001``. Folders, and names that begin with a dot or have none, are
passed over, as WebDataset does.
"""

from __future__ import annotations

import os
import tarfile
from typing import NamedTuple

from lockstep.errors import DataError

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_CHUNK_BYTES = 2**20


class Member(NamedTuple):
    """A field of a sample, and where in the shard its bytes are."""

    field: str
    offset: int
    size: int


Samples = dict[str, list[Member]]
"""The members of each sample by its key, in the order of the shard."""


def scan(path: str) -> Samples:
    """Return what the shard holds; reads every header and skips the data.

    Raises:
        DataError: It is cut short, compressed, damaged, or holds what has no place in a data set; names the record.
    """
    samples: Samples = {}
    last = "its beginning"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(2)
            if magic in _COMPRESSED:
                advice = "Decompress it: single records are read."
                raise _error(path, 0, f"is compressed with {_COMPRESSED[magic]}", advice)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every header in memory
                    _add(samples, member, path, size)
                    last = member.name
                end = archive.offset
        _require_end(path, end, size, last)
    except tarfile.TarError as error:
        raise _error(path, None, f"is damaged behind {last}: {error}", "Restore the shard.") from error
    except OSError as error:
        raise _error(path, None, f"cannot be read: {error.strerror}", "Check the file system.") from error
    return samples


def _add(samples: Samples, member: tarfile.TarInfo, path: str, size: int) -> None:
    if member.isdir():
        return
    begin, end = member.offset_data, member.offset_data + member.size
    if not member.isreg() or member.issparse():
        kind = "is sparse" if member.isreg() else "is a link or a device"
        raise _error(path, begin, f"holds {member.name}, which {kind}", "Add plain files (tar --dereference).")
    if end > size:
        raise _error(
            path, begin, f"ends at byte {size}, but {member.name} lies at bytes {begin} to {end}", "Restore the shard."
        )
    folder, _, name = member.name.rpartition("/")
    stem, dot, field = name.partition(".")
    if not stem or not dot:
        return
    members = samples.setdefault(f"{folder}/{stem}" if folder else stem, [])
    if any(other.field == field.lower() for other in members):
        raise _error(path, begin, f"holds {member.name} twice", "Give every sample of a shard a name of its own.")
    members.append(Member(field.lower(), begin, member.size))


def _require_end(path: str, end: int, size: int, last: str) -> None:
    """Check that the archive ends where its last member does: with zeros, as far as the file goes.

    The standard library takes the end of the file, a damaged header and the end of the first of several archives for
    the end. Samples would be lost without a word.
    """
    if end >= size:
        raise _error(path, end, f"has no end mark behind {last}: it was cut short", "Restore the shard.")
    with open(path, "rb") as file:
        file.seek(end)
        place = end
        while chunk := file.read(_CHUNK_BYTES):
            if chunk.strip(b"\0"):
                found = place + len(chunk) - len(chunk.lstrip(b"\0"))
                what = "a damaged header" if found < end + tarfile.BLOCKSIZE else "data behind its end mark"
                raise _error(
                    path, found, f"has {what} at byte {found}, behind {last}", "Make it anew, as a single archive."
                )
            place += len(chunk)


def _error(path: str, offset: int | None, what: str, advice: str) -> DataError:
    return DataError(f"{path} {what}.\n{advice}", file=path, offset=offset)
