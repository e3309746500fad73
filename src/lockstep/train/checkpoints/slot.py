"""A copy of a run's state in a file that lies in memory: it outlives the process that made it, however that ends.

A page with a mark comes first, then the copy: a safetensors file and JSON. The mark, which has the step, the sizes and
a checksum, is taken away before anything else is changed and put back last. So a process that is killed at any moment
leaves a copy that is whole or none. There is no disk, so nothing is flushed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.parallel.consistency import checksum
from lockstep.train.checkpoint_storage import (
    STATE,
    TENSORS,
    FileLayout,
    copy_tensors,
    file_layout,
    pack_parts,
    unpack_parts,
    views_of,
)

_MARK_BYTES = 4096
_ROOM = 1 << 14
"""The text may grow by so many bytes before the file is made anew."""


@dataclass(frozen=True)
class Mark:
    """What a copy says of itself.

    Attributes:
        step: After how many steps of the run it was taken.
        tensors_bytes: Of the safetensors file.
        rest_bytes: Of the JSON after it.
        sum: Over both.
    """

    step: int
    tensors_bytes: int
    rest_bytes: int
    sum: int

    @property
    def num_bytes(self) -> int:
        """Of the copy, without the mark."""
        return self.tensors_bytes + self.rest_bytes


class Slot:
    """Where a process writes one copy after the other, into the same memory as long as their sizes stay.

    Args:
        path: On a file system in memory.
        make_room: Called with the bytes that a new file takes, before it is made; raises if there is no room.
    """

    def __init__(self, path: Path, make_room: Callable[[int], None]) -> None:
        self.path, self._make_room = path, make_room
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None
        self._views: list[Tensor] = []
        self._is_registered = False

    def take(self, parts: Mapping[str, Any], step: int) -> Callable[[], None]:
        """Copy ``parts``; return what puts the mark, to be called once, from any thread, before the next copy.

        Blocks until the copy is made; with CUDA not at all, what is returned waits for it.

        Raises:
            UnfitValueError, OSError: It cannot be written.
        """
        tensors, rest = pack_parts(parts)
        layout = file_layout(tensors)
        rest += b" " * (-(layout.num_bytes + len(rest)) % 8)  # so that the checksum can read whole numbers
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        start = _MARK_BYTES + len(layout.header)
        end = start + layout.num_bytes
        if end + len(rest) > self._memory.numel():
            self._make(end + len(rest) + _ROOM, pinned=bool(devices))
        memory = self._memory
        memory[:_MARK_BYTES].zero_()
        _put(memory, _MARK_BYTES, layout.header)
        _put(memory, end, rest)
        if layout != self._layout:
            self._layout, self._views = layout, views_of(memory[start:end], layout, tensors)
        copy_tensors(self._views, [tensors[name] for name in layout.order])
        arrivals = []
        for device in devices:
            arrivals.append(torch.cuda.Event())
            arrivals[-1].record(torch.cuda.current_stream(device))
        sizes = len(layout.header) + layout.num_bytes, len(rest)

        def finish() -> None:
            for arrival in arrivals:
                arrival.synchronize()
            body = memory[_MARK_BYTES : _MARK_BYTES + sum(sizes)]
            _put(memory, 0, _text_of(Mark(step, *sizes, checksum([body]))))

        return finish

    def close(self) -> None:
        """Let go of the memory; the copy stays."""
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._is_registered = False
        self._layout, self._views = None, []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _make(self, num_bytes: int, *, pinned: bool) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        self._make_room(num_bytes)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Now, as an error: a page that is not there when it is written to would end the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._memory = torch.from_file(str(self.path), shared=True, size=num_bytes, dtype=torch.uint8)
        if pinned:  # without it copies still are right, but the device waits for them
            code = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)
            self._is_registered = int(code) == 0


def read_mark(path: Path) -> Mark | None:
    """Return what the copy in ``path`` says of itself; None if there is none, or none that was finished."""
    try:
        with path.open("rb") as file:
            return _mark_in(file.read(_MARK_BYTES))
    except OSError:
        return None


def read_copy(path: Path, mark: Mark) -> bytearray:
    """Return the copy in ``path``.

    Raises:
        CheckpointError: It is not what ``mark`` says.
    """
    body = bytearray(mark.num_bytes)
    try:
        with path.open("rb") as file:
            file.seek(_MARK_BYTES)
            num_read = file.readinto(body)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error
    if num_read != len(body) or checksum([torch.frombuffer(body, dtype=torch.uint8)]) != mark.sum:
        raise CheckpointError("does not match its checksum")
    return body


def parts_in(body: bytearray, mark: Mark) -> dict[str, Any]:
    """Return the parts in a copy. Runs no code from it.

    Raises:
        CheckpointError: It is not of the form that `Slot` writes.
    """
    view = memoryview(body)
    files = {TENSORS: bytes(view[: mark.tensors_bytes]), STATE: bytes(view[mark.tensors_bytes :])}
    return unpack_parts(files, Path("memory"))


def _text_of(mark: Mark) -> bytes:
    text = json.dumps(asdict(mark)).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest().encode() + b"\n" + text + b"\n"


def _mark_in(page: bytes) -> Mark | None:
    text = page.partition(b"\n")[2].partition(b"\n")[0]
    if not text:
        return None
    try:
        mark = Mark(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return mark if page.startswith(_text_of(mark)) else None


def _put(memory: Tensor, start: int, content: bytes) -> None:
    if content:
        memory[start : start + len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
