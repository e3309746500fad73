"""One checkpoint on disk: safetensors files, and JSON with their digests and the plan of DCP's chunks.

[Note: files of a checkpoint]
    shard-00000-TOKEN.safetensors   the tensors, or the boxes of tensors (DCP: chunks), that one rank holds
    state-TOKEN.json                everything else, with the names of tensors in their places, and where each chunk is
    manifest.json                   format, size and digest of each file that counts; its own digest in the first line
    part-00000-TOKEN.json           while it is written: what one rank has put into its shard file

All files of a save have its token in their names. So they never take the place of a file that a whole checkpoint needs,
and one rename, that of the manifest, makes the new checkpoint out of the old one. Nothing is pickled: DCP's own
``.metadata`` file is, and so are the values that are no tensors, which is why neither is used.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lockstep.train.checkpoints.model_state import StoredTensor, TensorChunks, sync

# Names of files that a save may remove.
MANIFEST = "manifest.json"
FORMAT = "lockstep checkpoint 2"
_STATE = "state"
_MAX_MANIFEST_BYTES = 1 << 22
_WRITE_BYTES = 1 << 22
_OURS = re.compile(r"((state|shard-\d{5,}|part-\d{5,})-[0-9a-f]{16}\.(json|safetensors)|.*-[0-9a-f]{16}\.tmp)")

# What reading raises where a file is not of the form that Lockstep writes.
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_PLAIN = {type(None), bool, int, float, str}
_OTHER_FORM = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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
            return self._add(value if isinstance(value, TensorChunks) else TensorChunks.of(value), place)
        if type(value) not in {Tensor, torch.nn.Parameter} or value.layout != torch.strided:
            raise UnfitValueError(f"{type(value).__qualname__} of layout {value.layout} at {place}")
        value = value.detach().resolve_conj().resolve_neg()
        # Tied tensors are written once. Shards are not compared: where they are empty, ranks would find other ties.
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


def write_shard(folder: Path, token: str, rank: int, tensors: Mapping[str, TensorChunks]) -> None:
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
    entry = _write_file(folder / file, _safetensors_pieces(content))
    # Rank zero waits for the record: it is there once the shard file is on disk, and in whole.
    record = part_file(folder, token, rank)
    temporary = record.with_suffix(".tmp")
    _write_file(temporary, [json.dumps({"entry": entry, "chunks": chunks}).encode()])
    temporary.replace(record)


def part_file(folder: Path, token: str, rank: int) -> Path:
    """Return where the record of what ``rank`` has written is."""
    return folder / f"part-{rank:05d}-{token}.json"


def _safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: each tensor from where it lies, if that is on the host in one piece.

    The safetensors package wants all as objects of bytes: a large state would be in memory once more.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that each lies at a multiple of its width
    entries, end = {}, 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # by the format data begin at a multiple of 8, so that they can be mapped
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            array: Any = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(array)


def _write_file(path: Path, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file; return its name, size and digest. Blocks until it is on disk."""
    digest, num_bytes = hashlib.blake2b(digest_size=32), 0
    # Exclusive: a name that is there already is of another save, and a link must not lead out of the folder.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in content:
            view = memoryview(piece)
            # In steps, so that what was just hashed is written while it is in the processor's cache.
            for start in range(0, len(view), _WRITE_BYTES):
                chunk = view[start : start + _WRITE_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                while len(chunk):
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"file": path.name, "bytes": num_bytes, "blake2b": digest.hexdigest()}


# --- what rank zero does before and after ---


def remove_leftover_files(folder: Path, token: str | None = None) -> None:
    """Remove what saves into ``folder`` have left that did not come to their end; not what save ``token`` writes."""
    # A manifest that cannot be read now may be one that can be read later, or by a later version: then nothing goes.
    with contextlib.suppress(CheckpointError):
        entries = read_manifest(folder).entries if (folder / MANIFEST).exists() else {}
        kept = {entry["file"] for entry in entries.values()}
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in kept and f"-{token}." not in path.name:
                path.unlink(missing_ok=True)


def commit(folder: Path, token: str, packer: TreePacker, world_size: int, about: Mapping[str, Any]) -> None:
    """Make what the ranks have written the checkpoint ``folder``. Blocks until that is on disk.

    Until the manifest is renamed the folder is what it was before.

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
    temporary = folder / f"manifest-{token}.tmp"
    _write_file(temporary, [f"{_digest(body)}\n".encode() + body + b"\n"])
    sync(folder)  # all names must be on disk before the manifest that lists them
    temporary.replace(folder / MANIFEST)
    sync(folder)
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


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one.")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file of a checkpoint in which something is not what was written.

    Raises:
        CheckpointError: For any error of the file system, and what a content of another form raises.
    """
    try:
        yield
    except FileNotFoundError:
        has_others = path.parent.is_dir() and any(_OURS.fullmatch(other.name) for other in path.parent.iterdir())
        if path.name == MANIFEST and not has_others:
            text = f"There is no checkpoint {path.parent}.\nIt must be a folder that every rank sees."
            raise CheckpointError(text) from None
        raise _damaged(path, "is not there") from None
    except _OTHER_FORM as error:
        why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        raise _damaged(path, f"cannot be read: {why}") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_manifest(folder: Path) -> Manifest:
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


def verify_files(folder: Path, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare size and digest of each file with the manifest; each rank takes its share of the shards.

    Raises:
        CheckpointError: A file is not what was written; names it.
    """
    for number, (name, entry) in enumerate(manifest.entries.items()):
        if number % world_size == rank or name == _STATE:
            path = folder / entry["file"]
            with _reading(path), path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes != entry["bytes"]:
                    raise _damaged(path, f"has {num_bytes} bytes, not {entry['bytes']}")
                digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32)).hexdigest()
            if digest != entry["blake2b"]:
                raise _damaged(path, "does not match its checksum")


def read_parts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the parts of a state, with tensors that are read when somebody wants them. Runs no code from the files.

    Raises:
        CheckpointError: They are not of the form that Lockstep writes.
    """
    shards = {}
    for part, entry in manifest.entries.items():
        path = folder / entry["file"]
        if part != _STATE:  # open from here on: a save that replaces the checkpoint removes its files
            with _reading(path):
                shards[part] = path, safe_open(path, "pt")
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


def _load(shards: Mapping[str, tuple[Path, Any]], name: str, chunks: list[Any], wanted: TensorChunks) -> None:
    """Read the chunks that this rank wants of a tensor, out of those that the ranks of the save have written."""
    boxes = [dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for _, _, at, sizes in chunks]
    saved = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=wanted.dtype), wanted.size, boxes)
    mine = [dcp.ChunkStorageMetadata(torch.Size(at), each.shape) for at, each in wanted.chunks.items()]
    for item in create_read_items_for_chunk_list(name, saved, mine):
        assert item.storage_index.index is not None
        rank, key, _, _ = chunks[item.storage_index.index]
        path, shard = shards[str(rank)]
        target = wanted.chunks[tuple(item.dest_index.offset or ())][_window(item.dest_offsets, item.lengths)]
        with _reading(path):
            found = shard.get_slice(key)[_window(item.storage_offsets, item.lengths)]
            if found.shape != target.shape:
                raise ValueError(f"{key} has another shape than in the state")
        target.copy_(found)


def _window(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
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
