"""One checkpoint, in a folder or an object store: safetensors files, and JSON with digests and DCP's chunks.

[Note: files of a checkpoint]
    shard-00000-TOKEN.safetensors   the tensors, or the boxes of tensors (DCP: chunks), that one rank holds
    state-TOKEN.json                everything else, with the names of tensors in their places, and where each chunk is
    manifest.json                   format, size and digest of each file that counts; its own digest in the first line
    part-00000-TOKEN.json           while it is written: what one rank has put into its shard file

All files of a save have its token in their names. So they never take the place of a file that a whole checkpoint needs,
and one rename, that of the manifest (in an object store: the object), makes the new checkpoint out of the old one.
Nothing is pickled: DCP's own ``.metadata`` file is, and so are the values that are no tensors, which is why neither is
used.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lockstep.comm.collectives import Group, all_gather_object
from lockstep.comm.fully_shard import is_sharded
from lockstep.errors import CheckpointError
from lockstep.train.checkpoints.model_state import (
    SAFETENSORS_DTYPES,
    StoredTensor,
    TensorChunks,
    safetensors_pieces,
    sync,
)
from lockstep.train.checkpoints.object_store import ObjectPath, Place

MANIFEST = "manifest.json"
FORMAT = "lockstep checkpoint 2"
_STATE = "state"
_MAX_MANIFEST_BYTES, _MAX_HEADER_BYTES = 1 << 22, 1 << 27
_WRITE_BYTES = 1 << 22

# Of objects: what is read in one request at most, and at least.
_READ_BYTES, _AHEAD_BYTES = 1 << 24, 1 << 20

# Names of files that a save may remove.
_OURS = re.compile(r"((state|shard-\d{5,}|part-\d{5,})-[0-9a-f]{16}\.(json|safetensors)|.*-[0-9a-f]{16}\.tmp)")

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_PLAIN = {type(None), bool, int, float, str}

# What reading raises where a file is not of the form that Lockstep writes.
_OTHER_FORM = (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

# How an error begins that says nothing about the checkpoint.
NO_ANSWER = "The object store does not give"


class UnfitValueError(ValueError):
    """A value that cannot be written; names its type and place."""


# --- a state as JSON and named tensors ---


class TreePacker:
    """Takes a state apart into JSON and named tensors. Nothing else can be in it, so reading it runs no code.

    DCP's own flattening is not used: it makes lists of dicts with integer keys, as optimizers have, and pickles leaves.

    Args:
        is_coordinator: Whether this rank holds what all ranks have alike; the others hold only their shards.

    Attributes:
        parts: By name: all but the tensors, as JSON.
        tensors: By name: what this rank holds of each, where it lies.
        is_sharded: Whether other ranks hold a part of any; the same on every rank.
    """

    def __init__(self, *, is_coordinator: bool) -> None:
        self.parts: dict[str, Any] = {}
        self.tensors: dict[str, TensorChunks] = {}
        self.is_sharded = False
        self._is_coordinator = is_coordinator
        self._packed: dict[tuple[Any, ...], dict[str, str]] = {}

    def pack(self, value: Any, place: str) -> Any:
        """Return ``value`` as JSON in which tensors are named by their place.

        Raises:
            UnfitValueError: It holds more than numbers, strings, bytes, lists, tuples, dicts and tensors.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor | TensorChunks):
            return self._pack_tensor(value, place)
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind in {list, tuple}:
            items = [self.pack(item, f"{place}.{number}") for number, item in enumerate(value)]
            return {"tuple": items} if kind is tuple else items
        if isinstance(value, dict):
            # Pairs, as a JSON object would make 1 and "1" the same key.
            return {"dict": [[_pack_key(key, place), self.pack(item, f"{place}.{key}")] for key, item in value.items()]}
        raise UnfitValueError(f"{kind.__module__}.{kind.__qualname__} at {place}")

    def writers(self, world_size: int) -> range:
        """Return which ranks write a shard file: where nothing is sharded rank zero alone."""
        return range(world_size if self.is_sharded else 1)

    def _pack_tensor(self, value: Tensor | TensorChunks, place: str) -> dict[str, str]:
        if isinstance(value, TensorChunks) or is_sharded(value):
            self.is_sharded = True
            # The same object under two names, such as of tied parameters, is the same on every rank.
            if (id(value),) not in self._packed:
                held = value if isinstance(value, TensorChunks) else TensorChunks.of(value)
                self._packed[(id(value),)] = self._add(held, place)
            return self._packed[(id(value),)]
        if type(value) not in {Tensor, torch.nn.Parameter} or value.layout != torch.strided:
            raise UnfitValueError(f"{type(value).__qualname__} of layout {value.layout} at {place}")
        value = value.detach().resolve_conj().resolve_neg()
        # Tied tensors are written once. Memory of shards is not compared: empty ones would be other ties on each rank.
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or memory not in self._packed:
            held = TensorChunks.of(value)
            self._packed[memory] = self._add(held if self._is_coordinator else replace(held, chunks={}), place)
        return self._packed[memory]

    def _add(self, held: TensorChunks, place: str) -> dict[str, str]:
        # Such as a model that was built without memory and never filled.
        on_meta = any(chunk.is_meta for chunk in held.chunks.values())
        if held.dtype not in SAFETENSORS_DTYPES or on_meta:
            raise UnfitValueError(f"tensor of {held.dtype}{' on meta' if on_meta else ''} at {place}")
        # A name goes into the file's header, whose reader knows no half characters.
        place = place.encode("utf-8", "backslashreplace").decode()
        name, number = place, 1
        while name in self.tensors:  # such as the keys 1 and "1" of one dict
            number += 1
            name = f"{place}#{number}"
        self.tensors[name] = held
        return {"tensor": name}


def _pack_key(key: Any, place: str) -> Any:
    if type(key) in {*_PLAIN, bytes, complex, tuple}:
        packer = TreePacker(is_coordinator=True)
        packed = packer.pack(key, f"a key of {place}")
        if not packer.tensors:
            return packed
    raise UnfitValueError(f"{type(key).__qualname__} as a key of {place}")


def pack_parts(parts: Mapping[str, Any], *, is_coordinator: bool) -> TreePacker:
    """Return what took ``parts`` apart: the tensors by name, where they lie, and the rest as JSON.

    Raises:
        UnfitValueError: They hold what cannot be written.
    """
    packer = TreePacker(is_coordinator=is_coordinator)
    try:
        packer.parts = {name: packer.pack(part, name) for name, part in parts.items()}
    except RecursionError:
        raise UnfitValueError("what holds itself or is nested too deep") from None
    return packer


_UNPACK: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "tensor": lambda content, tensors: tensors[content],
    "tuple": lambda content, tensors: tuple(_unpack(item, tensors) for item in content),
    "dict": lambda content, tensors: {_unpack(key, {}): _unpack(item, tensors) for key, item in content},
    "complex": lambda content, _: complex(*content),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
}


def _unpack(packed: Any, tensors: Mapping[str, Any]) -> Any:
    """Return what `TreePacker.pack` took apart; what it raises for another form is among `_OTHER_FORM`."""
    if type(packed) is list:
        return [_unpack(item, tensors) for item in packed]
    if type(packed) is not dict:
        return packed
    ((kind, content),) = packed.items()
    return _UNPACK[kind](content, tensors)


def states_of_ranks(mine: Mapping[str, Any], *, group: Group, device: torch.device) -> list[dict[str, Any]]:
    """Return what each rank has of its own, by rank: tensors as chunks, which only their rank holds.

    All ranks return the same but for that, and rank zero writes it into the checkpoint.

    Collective: every rank. Blocks.

    Args:
        mine: Of this rank.
        group: The ranks.
        device: Where messages lie while they travel.
    """
    own = pack_parts(mine, is_coordinator=True)
    sizes = {name: [SAFETENSORS_DTYPES[held.dtype], list(held.size)] for name, held in own.tensors.items()}
    states = []
    for rank, (parts, theirs) in enumerate(all_gather_object([own.parts, sizes], group=group, device=device)):
        absent = {name: TensorChunks(torch.Size(size), _DTYPES[dtype], {}) for name, (dtype, size) in theirs.items()}
        tensors = own.tensors if rank == group.rank() else absent
        states.append({name: _unpack(part, tensors) for name, part in parts.items()})
    return states


# --- what each rank writes ---


def write_shard(folder: Place, token: str, rank: int, tensors: Mapping[str, TensorChunks]) -> None:
    """Write what this rank holds of ``tensors`` as one safetensors file, and a record of what is in it.

    Blocks until both are on disk; communicates nothing. DCP's own loop is not used: it pickles the plans of all ranks
    over their group, and would do so in a thread, beside the collectives of the steps. Plans need not meet: rank zero
    alone holds what is not sharded, and what the others hold is in their records.

    Raises:
        OSError: It cannot be written.
    """
    content: dict[str, Tensor] = {}
    chunks: dict[str, list[Any]] = {}
    for name, held in tensors.items():
        for offsets, chunk in held.chunks.items():
            # Whole tensors keep their name, so that the file of an unsharded model is one that others can read.
            key = name if chunk.shape == held.size else f"{name} from {list(offsets)}"
            content[key] = chunk
            chunks.setdefault(name, []).append([rank, key, offsets, list(chunk.shape)])
    file = f"shard-{rank:05d}-{token}.safetensors"
    entry = _write_file(folder / file, safetensors_pieces(content))
    # Rank zero waits for the record: it is there once the shard file is on disk, and in whole.
    _put(part_file(folder, token, rank), token, json.dumps({"entry": entry, "chunks": chunks}).encode())


def part_file(folder: Place, token: str, rank: int) -> Place:
    """Return where the record of what ``rank`` has written is."""
    return folder / f"part-{rank:05d}-{token}.json"


def _write_file(path: Place, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file; return its name, size and digest. Blocks until it is on disk."""
    digest, num_bytes = hashlib.blake2b(digest_size=32), 0
    with _new_file(path) as write:
        for piece in content:
            view = memoryview(piece)
            # In steps, so that what was just hashed is written while it is in the processor's cache.
            for start in range(0, len(view), _WRITE_BYTES):
                chunk = view[start : start + _WRITE_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                write(chunk)
    return {"file": path.name, "bytes": num_bytes, "blake2b": digest.hexdigest()}


@contextlib.contextmanager
def _new_file(path: Place) -> Iterator[Callable[[memoryview], object]]:
    """Give what writes to a new file, which is on disk once the block is left."""
    if isinstance(path, ObjectPath):
        # After an error half of the object may be there: no manifest names it.
        with path.open("wb") as file:
            yield file.write
        return
    # Exclusive: a name that is there already is of another save, and a link must not lead out of the folder.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(chunk: memoryview) -> None:
        while len(chunk):
            chunk = chunk[os.write(descriptor, chunk) :]

    try:
        yield write
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(path: Place, token: str, content: bytes) -> None:
    """Write a file that is there in whole or not at all, maybe in the place of another. Blocks until it is on disk."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
        return
    temporary = path.with_name(f"{path.stem}-{token}.tmp")
    _write_file(temporary, [content])
    sync(path.parent)  # all names must be on disk before the manifest that lists them
    temporary.replace(path)
    sync(path.parent)


# --- what rank zero does before and after ---


def remove_leftover_files(folder: Place, token: str | None = None) -> None:
    """Remove what saves into ``folder`` have left that did not come to their end; not what save ``token`` writes."""
    # A manifest that cannot be read now may be one that can be read later, or by a later version: then nothing goes.
    with contextlib.suppress(CheckpointError):
        entries = read_manifest(folder).entries if (folder / MANIFEST).exists() else {}
        kept = {entry["file"] for entry in entries.values()}
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in kept and f"-{token}." not in path.name:
                path.unlink(missing_ok=True)


def commit(folder: Place, token: str, packer: TreePacker, world_size: int, about: Mapping[str, Any]) -> None:
    """Make what the ranks have written the checkpoint ``folder``. Blocks until that is on disk.

    Until the manifest is in its place the folder is what it was before.

    Args:
        folder: Where the ranks have written their parts, all of which are there.
        token: Of the save.
        packer: What took the state apart.
        world_size: How many ranks there are.
        about: Small numbers and strings for the manifest.

    Raises:
        OSError, ValueError: It cannot be written, or parts of a tensor are missing.
    """
    index: dict[str, dict[str, Any]] = {
        name: {"dtype": SAFETENSORS_DTYPES[each.dtype], "size": list(each.size), "chunks": []}
        for name, each in packer.tensors.items()
    }
    entries: dict[str, Any] = {}
    for rank in packer.writers(world_size):
        part = json.loads(part_file(folder, token, rank).read_bytes())
        entries[str(rank)] = part["entry"]
        for name, chunks in part["chunks"].items():
            index[name]["chunks"] += chunks
    for name, each in index.items():
        # Ranks may hold the same chunk, as they do on a mesh that also replicates: one of them counts.
        each["chunks"] = list({tuple(chunk[2]): chunk for chunk in each["chunks"]}.values())
        _check_cover(name, each, entries)
    content = json.dumps({"state": packer.parts, "tensors": index}).encode()
    entries[_STATE] = _write_file(folder / f"{_STATE}-{token}.json", [content])
    body = json.dumps({"format": FORMAT, "files": entries, "about": dict(about)}).encode()
    _put(folder / MANIFEST, token, f"{_digest(body)}\n".encode() + body + b"\n")
    if isinstance(folder, Path):
        sync(folder.parent)
    remove_leftover_files(folder)


# --- reading ---


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, by its manifest.

    Attributes:
        entries: ``file``, ``bytes`` and ``blake2b`` of the state and of each rank's shard.
        about: What the writer added.
        digest: Of the manifest; no two checkpoints have the same.
    """

    entries: Mapping[str, Any]
    about: Mapping[str, Any]
    digest: str


def _damaged(path: Place, why: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one.")


@contextlib.contextmanager
def _reading(path: Place) -> Iterator[None]:
    """Name the file of a checkpoint in which something is not what was written.

    Raises:
        CheckpointError: For any error of the file system, and what a content of another form raises.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        # In an object store a save that was killed leaves files without a manifest, which are no checkpoint.
        is_folder = isinstance(path, Path) and path.parent.is_dir()
        has_others = is_folder and any(_OURS.fullmatch(other.name) for other in path.parent.iterdir())
        if path.name == MANIFEST and not has_others:
            text = f"There is no checkpoint {path.parent}.\nIt must be a folder that every rank sees."
            raise CheckpointError(text) from None
        raise _damaged(path, "is not there") from None
    except Exception as error:
        why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        if isinstance(error, _OTHER_FORM) or (isinstance(path, Path) and isinstance(error, OSError)):
            raise _damaged(path, f"cannot be read: {why}") from error
        if isinstance(path, Path):
            raise
        # Another checkpoint must not be loaded, and this one removed, because the network is down.
        raise CheckpointError(f"{NO_ANSWER} {path}: {why}.\nStart again once it does.") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest in ``folder``; its files are not read.

    Raises:
        CheckpointError: There is no manifest, or it is damaged, or of another version.
    """
    path = folder / MANIFEST
    with _reading(path), path.open("rb") as file:
        digest, _, body = file.read(_MAX_MANIFEST_BYTES).partition(b"\n")
        if digest != _digest(body.removesuffix(b"\n")).encode():
            raise _damaged(path, "does not match its checksum")
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            found = manifest["format"]
            raise _damaged(path, f"is of the format {found!r} of another version of Lockstep, not {FORMAT!r}")
        entries = manifest["files"]
        for entry in (entries[_STATE], *entries.values()):
            if not _OURS.fullmatch(entry["file"]):  # no names that point out of the folder
                raise ValueError(f"it names the file {entry['file']}")
        return Manifest(entries, manifest["about"], digest.decode())


def verify_files(folder: Place, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare size and digest of each file with the manifest; each rank takes its share of the shards.

    Raises:
        CheckpointError: A file is not what was written; names it.
    """
    for number, (name, entry) in enumerate(manifest.entries.items()):
        if number % world_size == rank or name == _STATE:
            path = folder / entry["file"]
            with _reading(path), path.open("rb") as file:
                num_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                if num_bytes != entry["bytes"]:
                    raise _damaged(path, f"has {num_bytes} bytes, not {entry['bytes']}")
                digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32)).hexdigest()
            if digest != entry["blake2b"]:
                raise _damaged(path, "does not match its checksum")


def read_parts(folder: Place, manifest: Manifest) -> dict[str, Any]:
    """Return the parts of a state, with tensors that are read when somebody wants them. Runs no code from the files.

    Raises:
        CheckpointError: They are not of the form that Lockstep writes.
    """
    shards = {}
    for part, entry in manifest.entries.items():
        path = folder / entry["file"]
        if part != _STATE:  # open from here on: a save that replaces the checkpoint removes its files
            with _reading(path):
                shards[part] = path, safe_open(path, "pt") if isinstance(path, Path) else _ObjectShard(path)
    path = folder / manifest.entries[_STATE]["file"]
    with _reading(path):
        content = json.loads(path.read_bytes())
        tensors = {}
        for name, stored in content["tensors"].items():
            _check_cover(name, stored, shards)
            load = partial(_load, shards, name, stored["chunks"])
            tensors[name] = StoredTensor(torch.Size(stored["size"]), _DTYPES[stored["dtype"]], load)
        parts = {name: _unpack(packed, tensors) for name, packed in content["state"].items()}
        if type(parts["state"]) is not dict:
            raise ValueError("it holds no state")
    return parts


class _ObjectShard:
    """A safetensors file in an object store, of which ranges are read."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._ahead_at, self._ahead = path, 0, b""
        self._start = 8 + int.from_bytes(self._read(0, 8), "little")
        self._entries = json.loads(self._read(8, min(self._start, _MAX_HEADER_BYTES) - 8))

    def _read(self, start: int, num_bytes: int) -> bytes:
        """Return a range of the file. If it is short, more is read: what is wanted next often follows."""
        at = start - self._ahead_at
        if at >= 0 and at + num_bytes <= len(self._ahead):
            return self._ahead[at : at + num_bytes]
        content = self._path.read_bytes(start, start + max(num_bytes, _AHEAD_BYTES))
        if num_bytes < _AHEAD_BYTES:  # there may be many files, and not so much memory
            self._ahead_at, self._ahead = start, content
        return content[:num_bytes]

    def read_box(self, key: str, window: tuple[slice, ...]) -> Tensor:
        """Return a box of a tensor."""
        entry = self._entries[key]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        if any(each.stop > length for each, length in zip(window, shape, strict=True)):
            raise ValueError(f"{key} has another shape than in the state")
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        sizes = [each.stop - each.start for each in window]
        # From the first element of the box to the last: for rows, and parts of a row, nothing else lies between.
        first = sum(each.start * stride for each, stride in zip(window, strides, strict=True))
        numel = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        at = self._start + entry["data_offsets"][0] + first * dtype.itemsize
        content = bytearray(self._read(at, numel * dtype.itemsize))
        return torch.frombuffer(content, dtype=dtype, count=numel).as_strided(sizes, strides)


def _load(shards: Mapping[str, tuple[Place, Any]], name: str, chunks: list[Any], wanted: TensorChunks) -> None:
    """Read the chunks that this rank wants of a tensor, out of those that the ranks of the save have written."""
    boxes = [dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for _, _, at, sizes in chunks]
    saved = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=wanted.dtype), wanted.size, boxes)
    mine = [dcp.ChunkStorageMetadata(torch.Size(at), each.shape) for at, each in wanted.chunks.items()]
    for item in create_read_items_for_chunk_list(name, saved, mine):
        assert item.storage_index.index is not None
        rank, key, _, _ = chunks[item.storage_index.index]
        path, shard = shards[str(rank)]
        target = wanted.chunks[tuple(item.dest_index.offset or ())][_window(item.dest_offsets, item.lengths)]
        # A range of an object is in memory once more while it is copied: it is read in pieces.
        rows = max(1, _READ_BYTES // max(1, target[:1].nbytes)) if target.dim() else 1
        for at, piece in enumerate(target.split(rows) if target.dim() else [target]):
            offsets = [start + at * rows * (dim == 0) for dim, start in enumerate(item.storage_offsets)]
            with _reading(path):
                box = _window(offsets, piece.shape)
                found = shard.read_box(key, box) if isinstance(path, ObjectPath) else shard.get_slice(key)[box]
                if found.shape != piece.shape:
                    raise ValueError(f"{key} has another shape than in the state")
            piece.copy_(found)


def _window(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))


def _check_cover(name: str, stored: Mapping[str, Any], shards: Mapping[str, Any]) -> None:
    """Check that the chunks of a tensor fill it: DCP leaves holes as they are, in memory that was never written.

    Raises:
        ValueError: They do not.
    """
    size, num_elements = stored["size"], 0
    if any(type(length) is not int or length < 0 for length in size) or stored["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the size {size}")
    for rank, _, offsets, sizes in stored["chunks"]:
        inside = all(0 <= start <= start + n <= end for start, n, end in zip(offsets, sizes, size, strict=True))
        num_elements += math.prod(sizes) if inside and str(rank) in shards else 0
    if num_elements != math.prod(size):
        raise ValueError(f"{name} has chunks of {num_elements} of its {math.prod(size)} elements")
