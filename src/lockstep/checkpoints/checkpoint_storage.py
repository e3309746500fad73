"""One checkpoint, in a folder or an object store: safetensors files, and JSON with digests and DCP's chunks.

[Note: files of a checkpoint]
    shard-00000-TOKEN.safetensors   the tensors, or the boxes of tensors (DCP: chunks), that one rank holds
    state-TOKEN.json                everything else, with tensors replaced by their names, and the place of each chunk
    manifest.json                   format, size and digest of each file; the first line is the manifest's own digest
    part-00000-TOKEN.json           only during a save: what one rank has written to its shard file

The names of all files of a save contain its token, so a save never overwrites a file that a complete checkpoint needs.
Renaming the manifest (in an object store: writing it) replaces the old checkpoint by the new one.
Nothing is pickled. DCP pickles its ``.metadata`` file and all values that are not tensors, so neither is used.
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

from lockstep.base.accelerator import recorded_event
from lockstep.checkpoints import model_state
from lockstep.checkpoints.model_state import SAFETENSORS_DTYPES, StoredTensor, TensorChunks
from lockstep.checkpoints.object_store import ObjectPath, Place
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.comm.fully_shard import is_sharded
from lockstep.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "lockstep checkpoint 2"
STATE = "state"
_MAX_MANIFEST_BYTES, _MAX_HEADER_BYTES = 1 << 22, 1 << 27
_WRITE_BYTES = 1 << 22

# Largest and smallest number of bytes that one request reads from an object.
_READ_BYTES, _AHEAD_BYTES = 1 << 24, 1 << 20

# Names of files that a save may remove.
_OURS = re.compile(r"((state|shard-\d{5,}|part-\d{5,})-[0-9a-f]{16}\.(json|safetensors)|.*-[0-9a-f]{16}\.tmp)")

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_PLAIN = {type(None), bool, int, float, str}

# Errors of reading a file whose content does not have the format of Lockstep.
_OTHER_FORM = (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

# How an error message begins that says nothing about whether the checkpoint is valid.
NO_ANSWER = "The object store does not give"


class UnfitValueError(ValueError):
    """A value that cannot be written; the message names its type and its place in the state."""


# --- a state as JSON and named tensors ---


class TreePacker:
    """Divides a state into JSON and named tensors. It accepts nothing else, so reading a state runs no code.

    DCP's own flattening is not used: it turns dicts with integer keys, as optimizers have, into lists, and it pickles
    leaves.

    Args:
        parts: The state, by name.
        is_coordinator: Whether this rank writes what is the same on all ranks; the others write only their shards.

    Attributes:
        parts: By name: everything except the tensors, as JSON.
        tensors: By name: the part of each tensor that this rank holds; not copied.
        is_sharded: Whether any tensor is divided among the ranks; the same on every rank.

    Raises:
        UnfitValueError: It holds more than numbers, strings, bytes, lists, tuples, dicts and tensors.
    """

    def __init__(self, parts: Mapping[str, Any], *, is_coordinator: bool) -> None:
        self.tensors: dict[str, TensorChunks] = {}
        self.is_sharded = False
        self._is_coordinator = is_coordinator
        self._packed: dict[tuple[Any, ...], dict[str, str]] = {}
        try:
            self.parts = {name: self._pack(part, name) for name, part in parts.items()}
        except RecursionError:
            raise UnfitValueError("a value that contains itself or is nested too deeply") from None

    def _pack(self, value: Any, place: str) -> Any:
        """Return ``value`` as JSON in which each tensor is replaced by its name."""
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
            items = [self._pack(item, f"{place}.{number}") for number, item in enumerate(value)]
            return {"tuple": items} if kind is tuple else items
        if isinstance(value, dict):
            for key in value:
                if type(key) not in _PLAIN:
                    raise UnfitValueError(f"{type(key).__qualname__} as a key of {place}")
            # Pairs, because in a JSON object the keys 1 and "1" would be the same.
            return {"dict": [[key, self._pack(item, f"{place}.{key}")] for key, item in value.items()]}
        raise UnfitValueError(f"{kind.__module__}.{kind.__qualname__} at {place}")

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, those of other ranks too."""
        return sum(math.prod(chunks.size) * chunks.dtype.itemsize for chunks in self.tensors.values())

    def writers(self, world_size: int) -> range:
        """Return the ranks that write a shard file: only rank zero if nothing is sharded."""
        return range(world_size if self.is_sharded else 1)

    def _pack_tensor(self, value: Tensor | TensorChunks, place: str) -> dict[str, str]:
        if isinstance(value, TensorChunks) or is_sharded(value):
            self.is_sharded = True
            # An object that has two names, such as tied parameters, has the same two names on every rank.
            if (id(value),) not in self._packed:
                held = value if isinstance(value, TensorChunks) else TensorChunks.of(value)
                self._packed[(id(value),)] = self._add(held, place)
            return self._packed[(id(value),)]
        if type(value) not in {Tensor, torch.nn.Parameter} or value.layout != torch.strided:
            raise UnfitValueError(f"{type(value).__qualname__} of layout {value.layout} at {place}")
        value = value.detach().resolve_conj().resolve_neg()
        # Tied tensors are written once. Shards are not compared by memory: empty shards would seem tied.
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or memory not in self._packed:
            held = TensorChunks.of(value)
            self._packed[memory] = self._add(held if self._is_coordinator else replace(held, chunks={}), place)
        return self._packed[memory]

    def _add(self, held: TensorChunks, place: str) -> dict[str, str]:
        on_meta = any(chunk.is_meta for chunk in held.chunks.values())
        if held.dtype not in SAFETENSORS_DTYPES or on_meta:
            raise UnfitValueError(f"tensor of {held.dtype}{' on meta' if on_meta else ''} at {place}")
        # The name is written to the header of the file, which must be valid UTF-8.
        place = place.encode("utf-8", "backslashreplace").decode()
        name, number = place, 1
        while name in self.tensors:  # such as the keys 1 and "1" of one dict
            number += 1
            name = f"{place}#{number}"
        self.tensors[name] = held
        return {"tensor": name}


_UNPACK: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "tensor": lambda content, tensors: tensors[content],
    "tuple": lambda content, tensors: tuple(_unpack(item, tensors) for item in content),
    "dict": lambda content, tensors: {key: _unpack(item, tensors) for key, item in content},
    "complex": lambda content, _: complex(*content),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
}


def _unpack(packed: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo `TreePacker`. Raises one of `_OTHER_FORM` if the input has another format."""
    if type(packed) is list:
        return [_unpack(item, tensors) for item in packed]
    if type(packed) is not dict:
        return packed
    ((kind, content),) = packed.items()
    return _UNPACK[kind](content, tensors)


def states_of_ranks(state: Mapping[str, Any], *, group: Group, device: torch.device) -> list[dict[str, Any]]:
    """Return the private state of each rank, by rank: tensors as chunks that only their own rank holds.

    Apart from these chunks all ranks return the same, and rank zero writes it to the checkpoint.

    Collective: every rank. Blocks.

    Args:
        state: The private state of this rank.
        group: The ranks.
        device: Device for messages.
    """
    packer = TreePacker(state, is_coordinator=True)
    sizes = {name: [SAFETENSORS_DTYPES[held.dtype], list(held.size)] for name, held in packer.tensors.items()}
    states = []
    for rank, (parts, shapes) in enumerate(all_gather_object([packer.parts, sizes], group=group, device=device)):
        absent = {name: TensorChunks(torch.Size(size), _DTYPES[dtype], {}) for name, (dtype, size) in shapes.items()}
        tensors = packer.tensors if rank == group.rank() else absent
        states.append({name: _unpack(part, tensors) for name, part in parts.items()})
    return states


# --- copies in host memory ---

# Of the tensors in a slab, and the least size of a slab, as a power of two.
_ALIGN_BYTES, _LEAST_SLAB = 64, 20


def plan_slabs(sizes_bytes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the sizes of a few slabs of memory, and for each of the tensors its slab and its place there.

    The allocator of pinned memory rounds every request up to a power of two. So slabs are powers of two, each no larger
    than what is left to place, unless one tensor is; the largest tensors are placed first.
    """
    padded = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes_bytes]
    slabs: list[int] = []
    free: list[int] = []
    places, left = [(0, 0)] * len(padded), sum(padded)
    for index, size in sorted(enumerate(padded), key=lambda item: item[1], reverse=True):
        slab = next((number for number, room in enumerate(free) if room >= size), len(free))
        if slab == len(free):
            slabs.append(1 << max((size - 1).bit_length(), left.bit_length() - 1, _LEAST_SLAB))
            free.append(slabs[-1])
        places[index] = slab, slabs[slab] - free[slab]
        free[slab] -= size
        left -= size
    return slabs, places


class HostStager:
    """Copies the chunks of a rank to host memory, which is reused as long as the shapes stay the same.

    DCP's stager is not used: it copies the whole storage of a view, which for shards of ZeRO-1 is the whole model, and
    it blocks until the device has finished.
    """

    def __init__(self) -> None:
        self._layout: Any = None
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, TensorChunks]) -> tuple[dict[str, TensorChunks], list[torch.Event]]:
        """Return a copy, and events after which it is complete. It is valid until the next call.

        A device copies asynchronously. Work that is queued there later, such as the next step, runs after the copy.
        """
        chunks = [chunk for held in tensors.values() for chunk in held.chunks.values()]
        layout = [(chunk.shape, chunk.dtype, chunk.device) for chunk in chunks]
        if layout != self._layout:
            self._copies.clear()  # first: there may be no memory for both
            sizes_bytes, places = plan_slabs([chunk.nbytes for chunk in chunks])
            on_device = any(not chunk.is_cpu for chunk in chunks)
            slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=on_device) for size in sizes_bytes]
            for chunk, (slab, offset) in zip(chunks, places, strict=True):
                cut = slabs[slab][offset : offset + chunk.nbytes]
                self._copies.append(cut.view(chunk.dtype).view(chunk.shape))
            self._layout = layout
        for copy, chunk in zip(self._copies, chunks, strict=True):
            copy.copy_(chunk, non_blocking=True)
        events = [recorded_event(device) for device in {chunk.device for chunk in chunks if not chunk.is_cpu}]
        copies = iter(self._copies)
        taken = {
            name: TensorChunks(held.size, held.dtype, {offsets: next(copies) for offsets in held.chunks})
            for name, held in tensors.items()
        }
        return taken, events


# --- what each rank writes ---


def write_shard(folder: Place, token: str, rank: int, tensors: Mapping[str, TensorChunks]) -> None:
    """Write the parts of ``tensors`` that this rank holds to a safetensors file, and a record of its content.

    Blocks until both are on disk. Not collective. DCP's own save is not used: it exchanges pickled plans over the
    group, which here would happen in a thread, at the same time as the collectives of the steps. The exchange is not
    needed: only rank zero writes what is not sharded, and each rank records what it writes.

    Raises:
        OSError: It cannot be written.
    """
    content: dict[str, Tensor] = {}
    chunks: dict[str, list[Any]] = {}
    for name, held in tensors.items():
        for offsets, chunk in held.chunks.items():
            # Whole tensors keep their names, so that other programs can read the file of an unsharded model.
            key = name if chunk.shape == held.size else f"{name} from {list(offsets)}"
            content[key] = chunk
            chunks.setdefault(name, []).append([rank, key, offsets, list(chunk.shape)])
    entry = _write_file(folder / f"shard-{rank:05d}-{token}.safetensors", model_state.safetensors_pieces(content))
    # Rank zero waits for the record, which is written after the complete shard file is on disk.
    put_file(part_file(folder, token, rank), json.dumps({"entry": entry, "chunks": chunks}).encode())


def part_file(folder: Place, token: str, rank: int) -> Place:
    """Return the path of the record of what ``rank`` has written."""
    return folder / f"part-{rank:05d}-{token}.json"


def _write_file(path: Place, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file; return its name, size and digest. Blocks until it is on disk."""
    digest, num_bytes = hashlib.blake2b(digest_size=32), 0
    # Exclusive: an existing file of this name belongs to another save, and a link must not lead out of the folder.
    # After an error a part of an object may remain, which no manifest names.
    with path.open("xb" if isinstance(path, Path) else "wb") as file, contextlib.ExitStack() as after_error:
        if isinstance(path, Path):
            after_error.callback(path.unlink, missing_ok=True)  # what is incomplete must not fill the disk
        for piece in content:
            view = memoryview(piece)
            # In steps, so that what was just hashed is written while it is in the processor's cache.
            for start in range(0, len(view), _WRITE_BYTES):
                chunk = view[start : start + _WRITE_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                file.write(chunk)
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
        after_error.pop_all()
    return {"file": path.name, "bytes": num_bytes, "blake2b": digest.hexdigest()}


def put_file(path: Place, content: bytes) -> None:
    """Create or replace a file in one step. Blocks until it is on disk."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
        return
    with model_state.whole_file(path) as temporary:
        temporary.write_bytes(content)


# --- before and after a save, on rank zero ---


def remove_leftover_files(folder: Place, token: str | None = None) -> None:
    """Remove the files of unfinished saves from ``folder``, except those of save ``token``."""
    # A manifest that cannot be read now may become readable, or be of a later version: then nothing is removed.
    with contextlib.suppress(CheckpointError):
        entries = read_manifest(folder).entries if (folder / MANIFEST).exists() else {}
        in_use = {entry["file"] for entry in entries.values()}
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in in_use and f"-{token}." not in path.name:
                path.unlink(missing_ok=True)


def commit(folder: Place, token: str, packer: TreePacker, world_size: int, about: Mapping[str, Any]) -> None:
    """Turn the files that the ranks have written into the checkpoint ``folder``. Blocks until it is on disk.

    The previous checkpoint in the folder stays valid until the new manifest replaces its manifest.

    Args:
        folder: Folder that contains the parts of all ranks.
        token: Token of the save.
        packer: The packed state.
        world_size: Number of ranks.
        about: Small numbers and strings for the manifest.

    Raises:
        OSError, ValueError: It cannot be written, or parts of a tensor are missing.
    """
    index: dict[str, dict[str, Any]] = {
        name: {"dtype": SAFETENSORS_DTYPES[chunks.dtype], "size": list(chunks.size), "chunks": []}
        for name, chunks in packer.tensors.items()
    }
    entries: dict[str, Any] = {}
    for rank in packer.writers(world_size):
        part = json.loads(part_file(folder, token, rank).read_bytes())
        entries[str(rank)] = part["entry"]
        for name, chunks in part["chunks"].items():
            index[name]["chunks"] += chunks
    for name, tensor in index.items():
        # Several ranks may hold the same chunk, as on a mesh that also replicates: one copy is listed.
        tensor["chunks"] = list({tuple(chunk[2]): chunk for chunk in tensor["chunks"]}.values())
        _check_cover(name, tensor, entries)
    content = json.dumps({"state": packer.parts, "tensors": index}).encode()
    entries[STATE] = _write_file(folder / f"{STATE}-{token}.json", [content])
    body = json.dumps({"format": FORMAT, "files": entries, "about": dict(about)}).encode()
    put_file(folder / MANIFEST, f"{_digest(body)}\n".encode() + body + b"\n")
    if isinstance(folder, Path):
        model_state.sync(folder.parent)
    remove_leftover_files(folder)


# --- reading ---


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, by its manifest.

    Attributes:
        entries: ``file``, ``bytes`` and ``blake2b`` of the state and of each rank's shard.
        about: Numbers and strings that the writer added.
        digest: Digest of the manifest; different for any two checkpoints.
    """

    entries: Mapping[str, Any]
    about: Mapping[str, Any]
    digest: str


def _damaged(path: Place, why: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one.")


@contextlib.contextmanager
def _reading(path: Place) -> Iterator[None]:
    """Turn errors while reading a file of a checkpoint into one that names the file.

    Raises:
        CheckpointError: The file system or the object store failed, or the content has another format.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        # In an object store a save that was killed leaves files without a manifest, which are not a checkpoint.
        is_folder = isinstance(path, Path) and path.parent.is_dir()
        has_others = is_folder and any(_OURS.fullmatch(other.name) for other in path.parent.iterdir())
        if path.name == MANIFEST and not has_others:
            text = f"There is no checkpoint {path.parent}.\nName a folder that every rank can read."
            raise CheckpointError(text) from None
        raise _damaged(path, "is missing") from None
    except NotADirectoryError:
        text = f"{path.parent} is a file, and no checkpoint of Lockstep, which is a folder."
        advice = "Read a file of torch.save with torch.load, and give it to load_state_dict of model and optimizer."
        raise CheckpointError(f"{text}\n{advice}") from None
    except Exception as error:
        why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        if isinstance(error, _OTHER_FORM) or (isinstance(path, Path) and isinstance(error, OSError)):
            raise _damaged(path, f"cannot be read: {why}") from error
        if isinstance(path, Path):
            raise
        # If the network is down, the run must not load an older checkpoint and remove this one.
        raise CheckpointError(f"{NO_ANSWER} {path}: {why}.\nStart again when the store responds.") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest in ``folder``. The files that it lists are not read.

    Raises:
        CheckpointError: There is no manifest, or it is damaged, or it is of another version.
    """
    path = folder / MANIFEST
    with _reading(path), path.open("rb") as file:
        digest, _, body = file.read(_MAX_MANIFEST_BYTES).partition(b"\n")
        if digest != _digest(body.removesuffix(b"\n")).encode():
            raise _damaged(path, "does not match its checksum")
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            version = manifest["format"]
            raise _damaged(path, f"has the format {version!r} of another version of Lockstep, not {FORMAT!r}")
        entries = manifest["files"]
        for entry in (entries[STATE], *entries.values()):
            if not _OURS.fullmatch(entry["file"]):  # a name must not lead out of the folder
                raise ValueError(f"it names the file {entry['file']}")
        return Manifest(entries, manifest["about"], digest.decode())


def verify_files(folder: Place, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare size and digest of each file with the manifest; each rank takes its share of the shards.

    Raises:
        CheckpointError: A file differs from what was written; names it.
    """
    for number, (name, entry) in enumerate(manifest.entries.items()):
        if number % world_size == rank or name == STATE:
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
    """Return the parts of a state, whose tensors are read on demand. Runs no code from the files.

    Raises:
        CheckpointError: The files do not have the format of Lockstep.
    """
    shards = {}
    for part, entry in manifest.entries.items():
        path = folder / entry["file"]
        if part != STATE:  # kept open: a save that replaces the checkpoint removes its files
            with _reading(path):
                shards[part] = path, safe_open(path, "pt") if isinstance(path, Path) else _ObjectShard(path)
    path = folder / manifest.entries[STATE]["file"]
    with _reading(path):
        content = json.loads(path.read_bytes())
        tensors = {}
        for name, stored in content["tensors"].items():
            _check_cover(name, stored, shards)
            load = partial(_load, shards, name, stored["chunks"])
            tensors[name] = StoredTensor(torch.Size(stored["size"]), _DTYPES[stored["dtype"]], load)
        parts = {name: _unpack(packed, tensors) for name, packed in content["state"].items()}
        if type(parts["state"]) is not dict:
            raise ValueError("it has no state")
    return parts


class _ObjectShard:
    """A safetensors file in an object store, which is read in ranges."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._ahead_at, self._ahead = path, 0, b""
        self._start = 8 + int.from_bytes(self._read(0, 8), "little")
        self._entries = json.loads(self._read(8, min(self._start, _MAX_HEADER_BYTES) - 8))

    def _read(self, start: int, num_bytes: int) -> bytes:
        """Return a range of the file. After a short range more is read ahead: the next read often follows it."""
        at = start - self._ahead_at
        if at >= 0 and at + num_bytes <= len(self._ahead):
            return self._ahead[at : at + num_bytes]
        content = self._path.read_bytes(start, start + max(num_bytes, _AHEAD_BYTES))
        if num_bytes < _AHEAD_BYTES:  # large ranges are not kept: many files may be open
            self._ahead_at, self._ahead = start, content
        return content[:num_bytes]

    def read_box(self, key: str, window: tuple[slice, ...]) -> Tensor:
        """Return a box of a tensor."""
        entry = self._entries[key]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        if any(part.stop > length for part, length in zip(window, shape, strict=True)):
            raise ValueError(f"{key} has another shape than in the state")
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        sizes = [part.stop - part.start for part in window]
        # All bytes from the first element of the box to the last. Rows and parts of a row have no others in between.
        first = sum(part.start * stride for part, stride in zip(window, strides, strict=True))
        numel = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        at = self._start + entry["data_offsets"][0] + first * dtype.itemsize
        content = bytearray(self._read(at, numel * dtype.itemsize))
        return torch.frombuffer(content, dtype=dtype, count=numel).as_strided(sizes, strides)


def _load(shards: Mapping[str, tuple[Place, Any]], name: str, chunks: list[Any], wanted: TensorChunks) -> None:
    """Read the chunks of a tensor that this rank needs from the chunks that the ranks of the save have written."""
    boxes = [dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for _, _, at, sizes in chunks]
    saved = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=wanted.dtype), wanted.size, boxes)
    needed = [dcp.ChunkStorageMetadata(torch.Size(at), chunk.shape) for at, chunk in wanted.chunks.items()]
    for item in create_read_items_for_chunk_list(name, saved, needed):
        assert item.storage_index.index is not None
        rank, key, _, _ = chunks[item.storage_index.index]
        path, shard = shards[str(rank)]
        target = wanted.chunks[tuple(item.dest_index.offset or ())][_window(item.dest_offsets, item.lengths)]
        # Read in pieces, because a range of an object takes memory a second time while it is copied.
        rows = max(1, _READ_BYTES // max(1, target[:1].nbytes)) if target.dim() else 1
        for at, piece in enumerate(target.split(rows) if target.dim() else [target]):
            offsets = [start + at * rows * (dim == 0) for dim, start in enumerate(item.storage_offsets)]
            with _reading(path):
                box = _window(offsets, piece.shape)
                content = shard.read_box(key, box) if isinstance(path, ObjectPath) else shard.get_slice(key)[box]
                if content.shape != piece.shape:
                    raise ValueError(f"{key} has another shape than in the state")
            piece.copy_(content)


def _window(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))


def _check_cover(name: str, stored: Mapping[str, Any], shards: Mapping[str, Any]) -> None:
    """Check that the chunks of a tensor fill it: DCP does not check this and would leave memory uninitialised.

    Raises:
        ValueError: They do not fill it.
    """
    size, num_elements = stored["size"], 0
    if any(type(length) is not int or length < 0 for length in size) or stored["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the size {size}")
    for rank, _, offsets, sizes in stored["chunks"]:
        inside = all(0 <= start <= start + n <= end for start, n, end in zip(offsets, sizes, size, strict=True))
        num_elements += math.prod(sizes) if inside and str(rank) in shards else 0
    if num_elements != math.prod(size):
        raise ValueError(f"{name} has chunks of {num_elements} of its {math.prod(size)} elements")
