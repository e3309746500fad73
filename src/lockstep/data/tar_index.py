"""The index of a tar shard: which bytes belong to which sample, kept in a file, so that a shard is scanned once.

[Note: the file of an index]
A line of JSON of fixed length says which shard it is for (bytes and time of change), and how long the index is. A table
of 8 bytes for each sample, and one more, says where the samples' records begin; a record is JSON: the key, and field,
offset and size of each member. A sample is looked up with two reads, and none of it is held in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.tar_scan import Member, Samples, scan
from lockstep.data.tokens import PositionalReader, size_of
from lockstep.errors import DataError

_FORMAT = "lockstep tar index 1"
_HEADER_BYTES = 256
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class TarIndex:
    """The index of one shard, opened."""

    shard: str
    path: str
    num_samples: int

    def look_up(self, number: int, reader: PositionalReader) -> tuple[str, list[Member]]:
        """Return key and members of a sample of this shard.

        Raises:
            DataError: The index cannot be read.
        """
        what = f"the entry of sample {number} of {self.shard}"
        table = reader.read(self.path, _HEADER_BYTES + number * _ENTRY_BYTES, 2 * _ENTRY_BYTES, what=what)
        begin, end = struct.unpack("<2Q", table)
        key, members = json.loads(reader.read(self.path, begin, end - begin, what=what))
        return key, [Member(*member) for member in members]


def open_indexes(shards: Sequence[str], cache: str | None) -> list[TarIndex]:
    """Return the index of each shard; scans those that have none, or an outdated one, and keeps it.

    Any number of processes may do so at once: each goes through the shards in an order of its own and leaves out those
    that another has finished by then. Index files are written beside and renamed, so none is ever seen half-written.

    Args:
        shards: Paths.
        cache: Folder for the index files. If None, they lie beside the shards (``shard.tar.index``), or in the user's
            cache folder where that must not be written to.

    Raises:
        DataError: A shard is missing or broken, or an index cannot be written.
    """
    for shard in shards:
        size_of(shard)
    order = list(range(len(shards)))
    random.Random(os.getpid()).shuffle(order)
    indexes = {number: _open(shards[number], cache) for number in order}
    return [indexes[number] for number in range(len(shards))]


def _open(shard: str, cache: str | None) -> TarIndex:
    status = os.stat(shard)
    signature = {"format": _FORMAT, "shard_bytes": status.st_size, "shard_mtime_ns": status.st_mtime_ns}
    paths = _places(shard, cache)
    for path in paths:
        num_samples = _read_header(path, signature)
        if num_samples is not None:
            return TarIndex(shard, path, num_samples)
    samples = scan(shard)
    path = paths[0] if len(paths) == 1 or os.access(os.path.dirname(shard), os.W_OK) else paths[1]
    try:
        _write(path, samples, signature)
    except OSError as error:
        raise DataError(
            f"The index of {shard} cannot be written to {path}: {error.strerror}.\n"
            "Name another folder for it (cache=...).",
            file=path,
        ) from error
    return TarIndex(shard, path, len(samples))


def _places(shard: str, cache: str | None) -> list[str]:
    """Return where the index may lie, the best place first."""
    name = f"{os.path.basename(shard)}.{hashlib.sha256(shard.encode()).hexdigest()[:16]}.index"
    if cache is not None:
        return [os.path.join(os.path.abspath(cache), name)]
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [f"{shard}.index", os.path.join(user, "lockstep", "tar", name)]


def _read_header(path: str, signature: dict[str, object]) -> int | None:
    """Return the number of samples in the index, or None if it is not there, not whole, or of another shard."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            size = os.fstat(file.fileno()).st_size
        if {name: header[name] for name in signature} != signature or header["index_bytes"] != size:
            return None
        return int(header["num_samples"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: str, samples: Samples, signature: dict[str, object]) -> None:
    records = [json.dumps([key, members], separators=(",", ":")).encode() for key, members in samples.items()]
    begins = [_HEADER_BYTES + (len(records) + 1) * _ENTRY_BYTES]
    for record in records:
        begins.append(begins[-1] + len(record))
    header = json.dumps({**signature, "num_samples": len(records), "index_bytes": begins[-1]}).encode()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f"{os.path.basename(path)}.", dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # mkstemp leaves it to its owner alone
            file.write(header.ljust(_HEADER_BYTES - 1) + b"\n")
            file.write(struct.pack(f"<{len(begins)}Q", *begins))
            file.writelines(records)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
