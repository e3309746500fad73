"""One checkpoint on disk: safetensors files and JSON with digests."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.errors import CheckpointError

# The few operations with which a checkpoint changes what is on disk: tests stop the process at each of them.


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are not there."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> FileIO:
    """Open a file that is not there yet, for writing without a buffer."""
    return open(path, "xb", buffering=0)


def write(file: FileIO, piece: memoryview) -> None:
    """Write all of ``piece``."""
    while len(piece):
        num_bytes = file.write(piece)
        assert num_bytes is not None, "the file blocks"
        piece = piece[num_bytes:]


def flush(file: FileIO) -> None:
    """Block until the file is on disk."""
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Block until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """Give a file or folder another name, in one go; a file takes the place of the one that has the name."""
    path.replace(new)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


# Tensors as the bytes of a safetensors file, without a second copy in memory; and a copy on the host to write from.
#
# Written here rather than by the safetensors package, which returns a file as one object of bytes: a large state
# would be in memory once more, and could not be copied into memory that is kept from save to save. It is read by that
# package.

Pieces = Iterable[bytes | memoryview]
"""The content of a file, in order."""

SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What can be written, and safetensors' name for it."""


@dataclass(frozen=True)
class FileLayout:
    """Where tensors lie in a file.

    Attributes:
        header: What comes before them.
        order: Their names, as they follow each other: wide dtypes first, so that each lies at a multiple of its width.
        starts: Of each, from the end of the header.
        num_bytes: Of all, without the header.
    """

    header: bytes
    order: tuple[str, ...]
    starts: tuple[int, ...]
    num_bytes: int


def file_layout(tensors: Mapping[str, Tensor]) -> FileLayout:
    """Return how ``tensors`` lie in a file."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    starts, entries, end = [], {}, 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        starts.append(start)
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, tuple(order), tuple(starts), end)


def pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a file's content: each tensor from where it lies, if that is on the host in one piece."""
    layout = file_layout(tensors)
    yield layout.header
    for name in layout.order:
        if tensors[name].numel():
            yield _bytes_of(tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8))


class HostCopy:
    """Memory on the host that takes a copy of tensors; the same memory again as long as they are of the same shapes."""

    def __init__(self) -> None:
        self._layout: FileLayout | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], Iterator[bytes | memoryview]]:
        """Copy ``tensors``; return what gives a file's content, once, from any thread, before the next copy is taken.

        Blocks until the copy is made; with CUDA not at all: what is queued on a device later waits for it there.
        """
        layout = file_layout(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if layout != self._layout or self._flat.is_pinned() != bool(devices):
            # Let go of the old one first; there may be no room for both.
            self._views, self._flat = [], torch.empty(0, dtype=torch.uint8)
            self._flat = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=bool(devices))
            self._views = views_of(self._flat, layout, tensors)
            self._layout = layout
        copy_tensors(self._views, [tensors[name] for name in layout.order])
        arrivals = []
        for device in devices:
            arrivals.append(torch.cuda.Event())
            arrivals[-1].record(torch.cuda.current_stream(device))
        flat = self._flat

        def content() -> Iterator[bytes | memoryview]:
            for arrival in arrivals:
                arrival.synchronize()
            yield layout.header
            if flat.numel():
                yield _bytes_of(flat)

        return content


def views_of(flat: Tensor, layout: FileLayout, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return where ``tensors`` lie in ``flat``, the bytes behind a file's header, in the order in the file."""
    return [
        flat[start : start + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
        for name, start in zip(layout.order, layout.starts, strict=True)
    ]


@torch.no_grad()
def copy_tensors(views: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy ``sources`` into ``views`` on the host; with CUDA does not wait for it, if these are page-locked."""
    pairs: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for view, source in zip(views, sources, strict=True):
        into, outof = pairs.setdefault(source.device, ([], []))
        into.append(view)
        outof.append(source)
    for device, (into, outof) in pairs.items():
        torch._foreach_copy_(into, outof, non_blocking=device.type == "cuda")


def _bytes_of(flat: Tensor) -> memoryview:
    array: Any = flat.detach().numpy()  # a buffer, though its annotations do not say so
    return memoryview(array)


# A checkpoint's folder: files with checksums, and a manifest, written last, that names those that count.
#
# The files of a save have names of their own, so that those of the one before stay as they are until the new manifest
# takes the place of the old one in one rename. Whatever is interrupted before that leaves the old checkpoint.

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
    make_folder(folder)
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
    flush_folder(folder)
    rename(temporary, folder / MANIFEST)
    flush_folder(folder)
    flush_folder(folder.parent)
    _remove_files_but(folder, {entry["file"] for entry in entries.values()})


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
        raise CheckpointError(damaged_message(path, "does not match its checksum"))
    try:
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            raise CheckpointError(damaged_message(path, f"is not of the format {FORMAT!r}"))
        entries: dict[str, Any] = manifest["files"]
        about = manifest.get("about", {})
        well_formed = type(about) is dict and all(
            _OURS.fullmatch(entry["file"]) and type(entry["bytes"]) is int and type(entry["blake2b"]) is str
            for entry in entries.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        well_formed = False
    if not well_formed:  # also names that point out of the folder
        raise CheckpointError(damaged_message(path, "is not of the form that Lockstep writes"))
    return Manifest(entries, about, checksum.decode())


def damaged_message(path: Path, why: str) -> str:
    """Return the message that the checkpoint's file ``path`` is not what was written."""
    return f"The checkpoint {path.parent} is damaged: {path.name} {why}.\nLoad another one."


def _read_checked(folder: Path, entry: Mapping[str, Any]) -> bytes:
    path = folder / entry["file"]
    content = _read(path, entry["bytes"])
    if _checksum(content) != entry["blake2b"]:
        raise CheckpointError(damaged_message(path, "does not match its checksum"))
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
        raise CheckpointError(damaged_message(path, "is not there")) from None
    except OSError as error:
        raise CheckpointError(damaged_message(path, f"cannot be read: {error.strerror}")) from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(damaged_message(path, "is not a file"))
        if num_bytes is None and found.st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(damaged_message(path, f"has {found.st_size} bytes, more than {_MAX_MANIFEST_BYTES}"))
        if num_bytes is not None and found.st_size != num_bytes:
            raise CheckpointError(damaged_message(path, f"has {found.st_size} bytes, not {num_bytes}"))
        try:
            return file.read()
        except OSError as error:
            raise CheckpointError(damaged_message(path, f"cannot be read: {error.strerror}")) from error


def _has_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(_OURS.fullmatch(path.name) for path in folder.iterdir())
    return False


def _remove_leftovers(folder: Path) -> None:
    """Remove the files of saves that were not finished, if it is known which these are."""
    # A manifest that cannot be read now may be one that can be read later, or by a later version: then nothing is.
    with contextlib.suppress(CheckpointError):
        named = read_manifest(folder) if (folder / MANIFEST).exists() else None
        _remove_files_but(folder, set() if named is None else {entry["file"] for entry in named.entries.values()})


def _remove_files_but(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            remove(path)


def _write(path: Path, content: Pieces) -> tuple[int, str]:
    """Write a file; return its size in bytes and its checksum."""
    digest, num_bytes = hashlib.blake2b(digest_size=32), 0
    with create(path) as file:
        for piece in content:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                write(file, chunk)
                num_bytes += len(chunk)
        flush(file)
    return num_bytes, digest.hexdigest()


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


# A state as JSON and named tensors, and back: nothing else can be in it, so reading it runs no code.

_PLAIN = {type(None), bool, int, float, str}


class UnfitValueError(ValueError):
    """A value that cannot be written; names its type and place."""


class Packer:
    """Takes a state apart. Equal tensors stay one; those that merely overlap become separate.

    Attributes:
        tensors: By name, where they lie: not copies.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, place: str) -> Any:
        """Return ``value`` as JSON in which tensors are named by their place.

        Raises:
            UnfitValueError: It holds more than numbers, strings, bytes, lists, tuples, dicts and dense tensors.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
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

    def _pack_tensor(self, tensor: Tensor, place: str) -> Any:
        if type(tensor) not in {Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
            raise UnfitValueError(f"{type(tensor).__qualname__} of layout {tensor.layout} at {place}")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        kind = "tensor"
        if tensor.is_complex():
            tensor, kind = torch.view_as_real(tensor), "complex tensor"
        if tensor.dtype not in SAFETENSORS_DTYPES or tensor.device.type == "meta":
            raise UnfitValueError(f"tensor of {tensor.dtype} on {tensor.device} at {place}")
        return {kind: self._add(tensor, place)}

    def _add(self, tensor: Tensor, place: str) -> str:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 0 and memory in self._names:
            return self._names[memory]
        # A name goes into the file's header, whose reader knows no half characters.
        place = place.encode("utf-8", "backslashreplace").decode()
        name, number = place, 1
        while name in self.tensors:  # such as the keys 1 and "1" of one dict
            number += 1
            name = f"{place}#{number}"
        self.tensors[name] = tensor
        self._names[memory] = name
        return name


def _pack_key(key: Any, place: str) -> Any:
    if type(key) in {*_PLAIN, bytes, complex, tuple}:
        packer = Packer()
        packed = packer.pack(key, f"a key of {place}")
        if not packer.tensors:
            return packed
    raise UnfitValueError(f"{type(key).__qualname__} as a key of {place}")


def unpack_tree(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `Packer.pack` took apart.

    Raises:
        ValueError: It is not of that form, or a tensor is not there.
    """
    if type(packed) in _PLAIN:
        return packed
    if type(packed) is list:
        return [unpack_tree(item, tensors) for item in packed]
    if type(packed) is dict and len(packed) == 1:
        ((kind, content),) = packed.items()
        if kind == "tensor" and type(content) is str and content in tensors:
            return tensors[content]
        if kind == "complex tensor" and type(content) is str and content in tensors:
            return _complex(tensors[content])
        if kind == "tuple" and type(content) is list:
            return tuple(unpack_tree(item, tensors) for item in content)
        if kind == "dict" and type(content) is list and all(type(pair) is list and len(pair) == 2 for pair in content):
            return {_unpack_key(key): unpack_tree(item, tensors) for key, item in content}
        if kind == "complex" and type(content) is list and [type(part) for part in content] == [float, float]:
            return complex(*content)
        if kind == "bytes" and type(content) is str:
            return base64.b64decode(content, validate=True)
    raise ValueError("its state is not of the form that Lockstep writes")


def _unpack_key(packed: Any) -> Any:
    key = unpack_tree(packed, {})
    try:
        hash(key)
    except TypeError:
        raise ValueError("a key in its state is not of the form that Lockstep writes") from None
    return key


def _complex(pairs: Tensor) -> Tensor:
    if pairs.dtype not in {torch.float16, torch.float32, torch.float64} or pairs.shape[-1:] != (2,):
        raise ValueError("a complex tensor in its state is not of the form that Lockstep writes")
    return torch.view_as_complex(pairs)


# The parts of a checkpoint, such as model and optimizer, as the files of its folder, and back.

TENSORS, STATE = "tensors.safetensors", "state.json"


def pack_parts(parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], bytes]:
    """Return the tensors in ``parts`` by name, where they lie, and the rest as JSON.

    Raises:
        UnfitValueError: They hold more than numbers, strings, bytes, lists, tuples, dicts and dense tensors.
    """
    packer = Packer()
    try:
        packed = {name: packer.pack(part, name) for name, part in parts.items()}
    except RecursionError:
        raise UnfitValueError("what holds itself or is nested too deep") from None
    return packer.tensors, json.dumps(packed).encode()


def read_parts(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """Return the parts in the checkpoint ``folder``, on the CPU, and its manifest. Runs no code from it.

    Raises:
        CheckpointError: There is none, or it is damaged; names the file.
    """
    files, manifest = read_folder(folder)
    return unpack_parts(files, folder), manifest


def unpack_parts(files: Mapping[str, bytes], folder: Path) -> dict[str, Any]:
    """Return the parts in the content of the files of the checkpoint ``folder``, on the CPU. Runs no code from it.

    Raises:
        CheckpointError: They are not of the form that Lockstep writes.
    """
    try:
        tensors = safetensors.torch.load(files[TENSORS])
        parts: dict[str, Any] = {name: unpack_tree(part, tensors) for name, part in json.loads(files[STATE]).items()}
        if type(parts["state"]) is not dict:
            raise ValueError("it holds no state")
    except (SafetensorError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(damaged_message(folder / "content", f"cannot be read: {error}")) from error
    return parts


def unfit_message(what: str, error: UnfitValueError) -> str:
    """Return the message that ``what``, such as a checkpoint's path, cannot hold something."""
    return (
        f"The checkpoint {what} cannot hold {error}.\n"
        "Give numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them."
    )


def unwritable_message(what: str, error: Exception) -> str:
    """Return the message that ``what`` cannot be written."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return f"Cannot write the checkpoint {what}: {why}.\nThe one before it is as it was."
