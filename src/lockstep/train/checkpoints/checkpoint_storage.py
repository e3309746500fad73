"""One checkpoint on disk: safetensors files and JSON with digests, behind DCP's planner and storage interfaces.

[Note: files of a checkpoint]
    shard-00000-TOKEN.safetensors   the tensors, or the boxes of tensors (DCP: chunks), that one rank holds
    state-TOKEN.json                everything else, with the names of tensors in their places, and where each chunk is
    manifest.json                   format, digest and size of each file that counts; its own digest in the first line
    part-00000-TOKEN.json           while it is written: what one rank has put into its shard file

All files of a save have its token in their names. So they never take the place of a file that a whole checkpoint needs,
and one rename, that of the manifest, makes the new checkpoint out of the old one. Nothing is pickled: DCP's own
``.metadata`` file is, and so are the values that are no tensors, which is why neither is used.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.fully_shard import is_sharded
from lockstep.errors import CheckpointError
from lockstep.train.checkpoints.model_state import StoredTensor, TensorChunks

MANIFEST = "manifest.json"
FORMAT = "lockstep checkpoint 2"
_WRITTEN_BY = {"lockstep checkpoint 1": "0.1.0.dev0 before it saved shards"}
"""Formats that are no longer read, and the versions that wrote them."""
_STATE = "state"
_MAX_MANIFEST_BYTES = 1 << 22
_WRITE_BYTES = 1 << 22
_OURS = re.compile(r"((state|shard-\d{5,}|part-\d{5,}|tensors)-[0-9a-f]{16}\.(json|safetensors)|.*-[0-9a-f]{16}\.tmp)")
"""Names of files that a save may remove; ``tensors`` is that of format 1."""

SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_PLAIN = {type(None), bool, int, float, str}
_OTHER_FORM = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading raises where a file is not of the form that Lockstep writes."""


class UnfitValueError(ValueError):
    """A value that cannot be written; names its type and place."""


def damaged_message(path: Path, why: str) -> str:
    """Return the message that the checkpoint's file ``path`` is not what was written."""
    return f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one."


# --- a state as JSON and named tensors ---


class TreePacker:
    """Takes a state apart into JSON and named tensors. Nothing else can be in it, so reading it runs no code.

    DCP's own flattening is not used: it makes lists of dicts with integer keys, as optimizers have, and pickles leaves.

    Args:
        is_coordinator: Whether this rank holds what all ranks have alike; the others hold only their shards.

    Attributes:
        tensors: By name: what this rank holds of each, where it lies.
        is_sharded: Whether other ranks hold a part of any; the same on every rank.
    """

    def __init__(self, *, is_coordinator: bool) -> None:
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
            return {"dict": [[_pack_key(key, place), self.pack(item, f"{place}.{key}")] for key, item in value.items()]}
        raise UnfitValueError(f"{kind.__module__}.{kind.__qualname__} at {place}")

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
            self._packed[memory] = self._add(held if self._is_coordinator else held.without_chunks(), place)
        return self._packed[memory]

    def _add(self, held: TensorChunks, place: str) -> dict[str, str]:
        real = held.as_real()
        on_meta = any(chunk.is_meta for chunk in held.chunks.values())
        if real.dtype not in SAFETENSORS_DTYPES or on_meta:
            raise UnfitValueError(f"tensor of {held.dtype}{' on meta' if on_meta else ''} at {place}")
        # A name goes into the file's header, whose reader knows no half characters.
        place = place.encode("utf-8", "backslashreplace").decode()
        name, number = place, 1
        while name in self.tensors:  # such as the keys 1 and "1" of one dict
            number += 1
            name = f"{place}#{number}"
        self.tensors[name] = real
        return {"complex tensor" if held.dtype.is_complex else "tensor": name}


def _pack_key(key: Any, place: str) -> Any:
    if type(key) in {*_PLAIN, bytes, complex, tuple}:
        packer = TreePacker(is_coordinator=True)
        packed = packer.pack(key, f"a key of {place}")
        if not packer.tensors:
            return packed
    raise UnfitValueError(f"{type(key).__qualname__} as a key of {place}")


def pack_parts(parts: Mapping[str, Any], *, is_coordinator: bool) -> tuple[TreePacker, dict[str, Any]]:
    """Return the tensors in ``parts`` by name, where they lie, and the rest as JSON.

    Raises:
        UnfitValueError: They hold what cannot be written.
    """
    packer = TreePacker(is_coordinator=is_coordinator)
    try:
        return packer, {name: packer.pack(part, name) for name, part in parts.items()}
    except RecursionError:
        raise UnfitValueError("what holds itself or is nested too deep") from None


_UNPACK: dict[str, Callable[[Any, Mapping[str, StoredTensor]], Any]] = {
    "tensor": lambda content, tensors: tensors[content],
    "complex tensor": lambda content, tensors: tensors[content].as_complex(),
    "tuple": lambda content, tensors: tuple(unpack_tree(item, tensors) for item in content),
    "dict": lambda content, tensors: {unpack_tree(key, {}): unpack_tree(item, tensors) for key, item in content},
    "complex": lambda content, _: complex(*content),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
}


def unpack_tree(packed: Any, tensors: Mapping[str, StoredTensor]) -> Any:
    """Return what `TreePacker.pack` took apart, with tensors that are not read yet.

    Raises:
        ValueError, TypeError, KeyError: It is not of that form, or a tensor is not there.
    """
    if type(packed) is list:
        return [unpack_tree(item, tensors) for item in packed]
    if type(packed) is not dict:
        return packed
    ((kind, content),) = packed.items()
    return _UNPACK[kind](content, tensors)


# --- what DCP plans ---


class _SavePlanner(DefaultSavePlanner):
    """Plans to write the chunks that this rank holds; what another rank holds is not in its plan."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def create_local_plan(self) -> SavePlan:
        items = []
        for name, held in self.state_dict.items():
            for offsets, chunk in held.chunks.items():
                kind = WriteItemType.TENSOR if chunk.shape == held.size else WriteItemType.SHARD
                place = ChunkStorageMetadata(torch.Size(offsets), chunk.shape)
                data = TensorWriteData(place, TensorProperties(dtype=held.dtype), held.size)
                items.append(WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    @override
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        chunk: Tensor = self.state_dict[index.fqn].chunks[tuple(index.offset or ())]
        return chunk


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to read the chunks that this rank wants, out of those that the ranks of the save have written."""

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, wanted in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(torch.Size(offsets), each.shape) for offsets, each in wanted.chunks.items()]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        chunk: Tensor = self.state_dict[index.fqn].chunks[tuple(index.offset or ())]
        return chunk


# --- what each rank writes ---


class _WithoutPlans:
    """What DCP asks of a storage that has nothing to plan or to set up."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardWriter(_WithoutPlans, StorageWriter):
    """DCP's storage interface: writes what one rank holds as one safetensors file, and a record of what is in it.

    Args:
        folder: Of the checkpoint, which rank zero has made.
        token: Of the save.
        rank: Who writes.
    """

    def __init__(self, folder: Path, token: str, rank: int) -> None:
        self._folder, self._token, self._rank = folder, token, rank
        self._entry: dict[str, Any] = {}

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, results = {}, []
        for item in plan.items:
            assert item.tensor_data is not None
            # Whole tensors keep their name, so that the file of an unsharded model is one that others can read.
            name, offsets = item.index.fqn, list(item.index.offset or ())
            key = name if item.type == WriteItemType.TENSOR else f"{name} from {offsets}"
            chunk = planner.resolve_data(item)
            assert isinstance(chunk, Tensor)
            tensors[key] = chunk
            results.append(WriteResult(item.index, chunk.nbytes, [self._rank, key, offsets, list(chunk.shape)]))
        file = f"shard-{self._rank:05d}-{self._token}.safetensors"
        self._entry = {"file": file, **write_file(self._folder / file, safetensors_pieces(tensors))}
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the record. It is there once the shard file is on disk, and in whole: rank zero waits for it."""
        chunks: dict[str, list[Any]] = {}
        for result in results[0]:
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        record = part_file(self._folder, self._token, self._rank)
        temporary = record.with_suffix(".tmp")
        write_file(temporary, [json.dumps({"entry": self._entry, "chunks": chunks}).encode()])
        temporary.replace(record)

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...


def write_shard(folder: Path, token: str, rank: int, tensors: Mapping[str, TensorChunks]) -> None:
    """Write what this rank holds of ``tensors``. Blocks until it is on disk; communicates nothing.

    DCP's own loop is not used: it pickles the plans of all ranks over their group, and would do so in a thread, beside
    the collectives of the steps. Plans need not meet: rank zero alone holds what is not sharded, and what the others
    hold is in their records.

    Raises:
        OSError: It cannot be written.
    """
    planner, writer = _SavePlanner(), ShardWriter(folder, token, rank)
    planner.set_up_planner(dict(tensors))
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def part_file(folder: Path, token: str, rank: int) -> Path:
    """Return where the record of what ``rank`` has written is."""
    return folder / f"part-{rank:05d}-{token}.json"


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: each tensor from where it lies, if that is on the host in one piece.

    The safetensors package returns a file as one object of bytes: a large state would be in memory once more.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that each lies at a multiple of its width
    entries, end = {}, 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            array: Any = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(array)


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file; return its size and digest. Blocks until it is on disk."""
    digest, num_bytes = hashlib.blake2b(digest_size=32), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in content:
            view = memoryview(piece)
            for start in range(0, len(view), _WRITE_BYTES):
                chunk = view[start : start + _WRITE_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                while len(chunk):
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": num_bytes, "blake2b": digest.hexdigest()}


def sync_folder(path: Path) -> None:
    """Block until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what rank zero does before and after ---


def remove_leftover_files(folder: Path, token: str | None = None) -> None:
    """Remove what saves into ``folder`` have left that did not come to their end; not what save ``token`` writes."""
    # A manifest that cannot be read now may be one that can be read later, or by a later version: then nothing goes.
    with contextlib.suppress(CheckpointError):
        named = read_manifest(folder).files if (folder / MANIFEST).exists() else set()
        _remove_files_but(folder, named, token)


def commit(
    folder: Path,
    token: str,
    packed: Mapping[str, Any],
    tensors: Mapping[str, TensorChunks],
    ranks: Iterable[int],
    about: Mapping[str, Any],
) -> None:
    """Make what the ranks have written the checkpoint ``folder``. Blocks until that is on disk.

    Until the manifest is renamed the folder is what it was before.

    Args:
        folder: Where the ranks have written their parts, all of which are there.
        token: Of the save.
        packed: The state without its tensors.
        tensors: All that are in it.
        ranks: That wrote a part.
        about: Small numbers and strings for the manifest.

    Raises:
        OSError, ValueError: It cannot be written, or parts of a tensor are missing.
    """
    index: dict[str, dict[str, Any]] = {
        name: {"dtype": SAFETENSORS_DTYPES[each.dtype], "size": list(each.size), "chunks": []}
        for name, each in tensors.items()
    }
    entries: dict[str, Any] = {}
    for rank in ranks:
        part = json.loads(part_file(folder, token, rank).read_bytes())
        entries[str(rank)] = part["entry"]
        for name, chunks in part["chunks"].items():
            index[name]["chunks"] += chunks
    for name, each in index.items():
        # Ranks may hold the same chunk, as they do on a mesh that also replicates: one of them counts.
        each["chunks"] = list({tuple(chunk[2]): chunk for chunk in each["chunks"]}.values())
        _check_cover(name, each)
    state = f"{_STATE}-{token}.json"
    content = json.dumps({"state": packed, "tensors": index}).encode()
    entries[_STATE] = {"file": state, **write_file(folder / state, [content])}
    body = json.dumps({"format": FORMAT, "version": _version(), "files": entries, "about": dict(about)}).encode()
    temporary = folder / f"manifest-{token}.tmp"
    write_file(temporary, [f"{_digest(body)}\n".encode() + body + b"\n"])
    sync_folder(folder)  # all names are on disk before the manifest says that they are
    temporary.replace(folder / MANIFEST)
    sync_folder(folder)
    sync_folder(folder.parent)
    _remove_files_but(folder, {entry["file"] for entry in entries.values()})


# --- reading ---


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder says of itself.

    Attributes:
        entries: ``file``, ``bytes`` and ``blake2b`` of the state and of each rank's shard.
        about: What the writer added.
        digest: Of the manifest, which tells this checkpoint from all others.
    """

    entries: Mapping[str, Any]
    about: Mapping[str, Any]
    digest: str

    @property
    def files(self) -> set[str]:
        """The names of the files that count."""
        return {entry["file"] for entry in self.entries.values()}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file of a checkpoint in which something is not what was written.

    Raises:
        CheckpointError: For any error of the file system, and what a content of another form raises.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        if path.name == MANIFEST and not _has_files(path.parent):
            text = f"There is no checkpoint {path.parent}.\nIt must be a folder that every rank sees."
            raise CheckpointError(text) from None
        raise CheckpointError(damaged_message(path, "is not there")) from None
    except _OTHER_FORM as error:
        why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        raise CheckpointError(damaged_message(path, f"cannot be read: {why}")) from error


def _open(path: Path, num_bytes: int | None = None) -> BufferedReader:
    """Open a file, of ``num_bytes`` if that is known; no link out of the folder, and no pipe that somebody fills."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        why = "is not a file"
    elif num_bytes is not None and found.st_size != num_bytes:
        why = f"has {found.st_size} bytes, not {num_bytes}"
    else:
        return file
    file.close()
    raise CheckpointError(damaged_message(path, why))


def read_manifest(folder: Path) -> Manifest:
    """Return what ``folder`` says of itself, without a look at its files.

    Raises:
        CheckpointError: There is no manifest, or it is damaged, or of an older version.
    """
    path = folder / MANIFEST
    with _reading(path), _open(path) as file:
        digest, _, body = file.read(_MAX_MANIFEST_BYTES).partition(b"\n")
    body = body.removesuffix(b"\n")
    if digest != _digest(body).encode():
        raise CheckpointError(damaged_message(path, "does not match its checksum"))
    try:
        manifest = json.loads(body)
        found, entries, about = manifest["format"], manifest["files"], manifest["about"]
        if found in _WRITTEN_BY:
            raise CheckpointError(
                f"The checkpoint {folder} was written by Lockstep {_WRITTEN_BY[found]}, in a format that is no longer "
                "read.\nLoad it with that version, or start anew (resume=False)."
            )
        if found != FORMAT:
            written_by = f"Lockstep {manifest.get('version', 'of another version')}"
            raise CheckpointError(damaged_message(path, f"is of the format {found!r} of {written_by}, not {FORMAT!r}"))
        well_formed = _STATE in entries and all(
            # No names that point out of the folder.
            _OURS.fullmatch(entry["file"]) and type(entry["bytes"]) is int and type(entry["blake2b"]) is str
            for entry in entries.values()
        )
    except _OTHER_FORM:
        well_formed = False
    if not well_formed:
        raise CheckpointError(damaged_message(path, "is not of the form that Lockstep writes"))
    return Manifest(entries, about, digest.decode())


def verify_files(folder: Path, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare size and digest of each file with the manifest; each rank takes its share of the shards.

    Raises:
        CheckpointError: A file is not what was written; names it.
    """
    for number, (name, entry) in enumerate(manifest.entries.items()):
        if number % world_size == rank or name == _STATE:
            path = folder / entry["file"]
            with _reading(path), _open(path, entry["bytes"]) as file:
                digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32)).hexdigest()
            if digest != entry["blake2b"]:
                raise CheckpointError(damaged_message(path, "does not match its checksum"))


class ShardReader(_WithoutPlans, StorageReader):
    """DCP's storage interface: reads chunks out of the files of a checkpoint, whose digests were compared before.

    Args:
        folder: The checkpoint.
        manifest: Of it.

    Raises:
        CheckpointError: Its state is not of the form that Lockstep writes.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._files: dict[str, Any] = {}
        self._places: dict[MetadataIndex, tuple[str, str]] = {}
        self._metadata = Metadata({}, storage_data=self._places)
        path = folder / manifest.entries[_STATE]["file"]
        with _reading(path):
            content = json.loads(path.read_bytes())
            for name, each in content["tensors"].items():
                self._add(name, each)
            self.packed: dict[str, Any] = {**content["state"]}
        for part, entry in manifest.entries.items():
            path = folder / entry["file"]
            if part != _STATE:  # open from here on: a save that replaces the checkpoint removes its files
                with _reading(path):
                    self._files[entry["file"]] = safe_open(path, "pt")

    def _add(self, name: str, stored: Mapping[str, Any]) -> None:
        _check_cover(name, stored)
        chunks = []
        for file, key, offsets, sizes in stored["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            self._places[MetadataIndex(name, offsets)] = self._manifest.entries[str(file)]["file"], key
        properties = TensorProperties(dtype=_DTYPES[stored["dtype"]])
        self._metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(stored["size"]), chunks)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file, key = self._places[item.storage_index]
            window = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            with _reading(self._folder / file):
                found = self._files[file].get_slice(key)[window]
                if found.shape != target.shape:
                    raise ValueError(f"{key} has another shape than the state says")
            target.copy_(found)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...


def read_parts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the parts of a state, with tensors that are read when somebody wants them. Runs no code from the files.

    Raises:
        CheckpointError: They are not of the form that Lockstep writes.
    """
    reader = ShardReader(folder, manifest)
    metadata = reader.read_metadata()

    def load(name: str, wanted: TensorChunks) -> None:
        planner = _LoadPlanner()
        planner.set_up_planner({name: wanted}, metadata)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    tensors = {
        name: StoredTensor(stored.size, stored.properties.dtype, partial(load, name))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with _reading(folder / manifest.entries[_STATE]["file"]):
        parts = {name: unpack_tree(packed, tensors) for name, packed in reader.packed.items()}
        if type(parts["state"]) is not dict:
            raise ValueError("it holds no state")
    return parts


def _check_cover(name: str, stored: Mapping[str, Any]) -> None:
    """Check that the chunks of a tensor fill it: DCP leaves holes as they are, in memory that was never written.

    Raises:
        ValueError: They do not.
    """
    size, num_elements = stored["size"], 0
    if any(type(length) is not int or length < 0 for length in size) or stored["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the size {size}")
    for _, _, offsets, sizes in stored["chunks"]:
        inside = all(0 <= start <= start + n <= end for start, n, end in zip(offsets, sizes, size, strict=True))
        num_elements += math.prod(sizes) if inside else 0
    if num_elements != math.prod(size):
        raise ValueError(f"{name} has chunks of {num_elements} of its {math.prod(size)} elements")


def _has_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(_OURS.fullmatch(path.name) for path in folder.iterdir())
    return False


def _remove_files_but(folder: Path, kept: set[str], token: str | None = None) -> None:
    for path in folder.iterdir():
        is_of_save = token is not None and f"-{token}." in path.name
        if _OURS.fullmatch(path.name) and path.name not in kept and not is_of_save:
            path.unlink(missing_ok=True)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _version() -> str:
    try:
        return version("lockstep-torch")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
