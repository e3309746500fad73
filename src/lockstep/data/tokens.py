"""Files of tokens, one number after the other, as data sets of windows: for language models."""

from __future__ import annotations

import glob
import itertools
import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import ConfigurationError, DataError

# --- Names of files

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A name, in which braces and wildcards are expanded, or several."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand(files: Files) -> list[str]:
    """Return the absolute paths that ``files`` stands for.

    ``train-{000..031}.tar`` counts, with as many digits as are given; ``{train,valid}.bin`` lists; ``*``, ``?`` and
    ``[...]`` match what is there, sorted by name. What exists under the very name is taken as it is.

    Raises:
        ConfigurationError: There are none, or one is named twice.
        DataError: Nothing matches a pattern.
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths = [path for name in names for path in _expand_one(os.path.expanduser(os.fspath(name)))]
    if not paths:
        raise ConfigurationError("No files are named.\nGive the path of at least one.")
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ConfigurationError(f"{path} is named twice, so its samples would count twice.\nName each file once.")
        seen.add(path)
    return paths


def _expand_one(name: str) -> Iterator[str]:
    if os.path.exists(name):
        yield os.path.abspath(name)
        return
    for path in _braces(name):
        if not glob.has_magic(path) or os.path.exists(path):
            yield os.path.abspath(path)
            continue
        matches = sorted(glob.glob(path))
        if not matches:
            raise DataError(f"No file matches {path}.\nCheck the pattern, and that this machine sees the folder.")
        yield from map(os.path.abspath, matches)


def _braces(name: str) -> Iterator[str]:
    parts = _BRACES.split(name)  # the contents of braces are at odd places
    choices = [[part] if place % 2 == 0 else _alternatives(part) for place, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _alternatives(content: str) -> list[str]:
    numbers = _RANGE.fullmatch(content)
    if numbers is None:
        return content.split(",") if "," in content else [f"{{{content}}}"]
    first, last = numbers.groups()
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


# --- Reading
#
# Each piece is asked for with ``pread`` rather than mapped into memory: mapped pages count as the process's own
# memory until the system takes them back, and a file that became shorter would end the process with SIGBUS, where here
# it is an error that names the file. ``pread`` has no position, so threads and forked processes can share a descriptor.


_MAX_OPEN = 256
"""A quarter of what systems allow a process as a rule; further files are opened in place of the oldest."""


class _Descriptor:
    """An open file that closes itself once nobody reads from it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class PositionalReader:
    """Reads pieces of any number of files; opens each when it is first needed, in each process anew if pickled.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()

    def read(self, path: str, offset: int, size: int, *, what: str, sample: int | str | None = None) -> bytes:
        """Return ``size`` bytes of the file from ``offset`` on. Blocks until they are there.

        Args:
            path: The file.
            offset: In bytes.
            size: In bytes.
            what: What the bytes are, for errors: ``sample 7``.
            sample: The same for programs.

        Raises:
            DataError: The file cannot be opened or read, or ends before; names the file, the place and ``what``.
        """
        try:
            descriptor = self._open.get(path) or self._add(path)
            pieces = []
            missing = size
            while missing:
                piece = os.pread(descriptor.number, missing, offset + size - missing)
                if not piece:
                    break
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            cause = f"{path} cannot be read at byte {offset}, for {what}: {error.strerror}."
            advice = "Check that the file is still there, and that this machine sees it."
            raise DataError(f"{cause}\n{advice}", file=path, offset=offset, sample=sample) from error
        if missing:
            cause = (
                f"{path} ends at byte {offset + size - missing}, but {what} lies at bytes {offset} to {offset + size}."
            )
            advice = "The file was cut short after the data set was made. Restore it and resume."
            raise DataError(f"{cause}\n{advice}", file=path, offset=offset, sample=sample)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _add(self, path: str) -> _Descriptor:
        descriptor = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if len(self._open) >= _MAX_OPEN:  # a thread that reads from the oldest still holds it
            self._open.popitem(last=False)
        self._open[path] = descriptor
        return descriptor

    def __getstate__(self) -> dict[str, object]:
        return {"_open": OrderedDict()}


def size_of(path: str) -> int:
    """Return the bytes of a file.

    Raises:
        DataError: It is not there, is a folder, or must not be read.
    """
    try:
        status = os.stat(path)
        if os.path.isdir(path):
            raise DataError(f"{path} is a folder.\nName the files in it, as with {path}/*.", file=path)
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} must not be read by this user.\nChange its permissions.", file=path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.\nCheck the name, and that this machine sees it.", file=path) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.\nCheck the file system.", file=path) from error
    return status.st_size


# --- The data set


class _TokenFile(NamedTuple):
    """A file of tokens, from its byte ``start`` on."""

    path: str
    dtype: np.dtype[Any]
    start: int
    num_tokens: int


class TokenFiles(Dataset[tuple[Tensor, Tensor] | Tensor]):
    """Windows of ``length`` tokens, each with the same window one token later: ``(inputs, targets)``, both int64.

    Windows begin at every ``stride``-th token of a file and end within it. Tokens behind a file's last window are in no
    sample: fewer than ``stride`` of them, or all of a file that is shorter than a window (`num_unused_tokens` counts).
    Holds a few bytes for each file and nothing for each window. Can be pickled and forked.

    Args:
        files: A path, in which ``{000..031}``, ``{a,b}`` and ``*`` are expanded, or several. Those that end in ``.npy``
            say themselves what they hold; others are raw numbers.
        length: Tokens of a window.
        stride: Tokens from the beginning of a window to that of the next; ``length`` if None, so that each token is
            an input once.
        dtype: What raw files hold: a numpy integer type in this machine's byte order, or such as ``">u2"``.
        header_bytes: Bytes at the beginning of each raw file that are no tokens.
        target: Whether to give ``(inputs, targets)``; else the samples are single tensors of ``length`` tokens.

    Raises:
        DataError: A file is missing, or its size does not fit what it should hold; names it.
        ConfigurationError: A number is out of range, or no file holds a window.
    """

    def __init__(
        self,
        files: Files,
        *,
        length: int,
        stride: int | None = None,
        dtype: str = "uint16",
        header_bytes: int = 0,
        target: bool = True,
    ) -> None:
        for name, value, least in (("length", length, 1), ("stride", stride, 1), ("header_bytes", header_bytes, 0)):
            if value is not None and value < least:
                raise ConfigurationError(f"{name}={value} is too small.\nGive at least {least}.")
        self._window = length + target
        self._stride = stride or length
        self._target = target
        raw = _integers(dtype, "dtype")
        self._files = [
            _open_npy(path) if path.endswith(".npy") else _open_raw(path, raw, header_bytes) for path in expand(files)
        ]
        counts = [max(0, (file.num_tokens - self._window) // self._stride + 1) for file in self._files]
        self._ends = list(accumulate(counts))
        if not self._ends[-1]:
            longest = max(self._files, key=lambda file: file.num_tokens)
            raise ConfigurationError(
                f"No file holds a window of {self._window} tokens: the longest, {longest.path}, "
                f"has {longest.num_tokens}.\nMake length smaller."
            )
        self._reader = PositionalReader()

    @property
    def num_tokens(self) -> int:
        """Tokens in all files."""
        return sum(file.num_tokens for file in self._files)

    @property
    def num_unused_tokens(self) -> int:
        """Tokens behind the last window of their file."""
        counts = [end - before for end, before in zip(self._ends, [0, *self._ends], strict=False)]
        return self.num_tokens - sum((count - 1) * self._stride + self._window for count in counts if count)

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        """Return the window ``index``. Blocks until it is read.

        Raises:
            DataError: The file has become shorter, or cannot be read; names it, the byte and the sample.
            IndexError: There is no such window.
        """
        tokens = torch.from_numpy(self._read(index).astype(np.int64))
        return (tokens[:-1], tokens[1:]) if self._target else tokens

    def read_batch(self, indices: Sequence[int]) -> list[Tensor] | Tensor:
        """Return the windows as ``default_collate`` would: a row for each. Blocks until they are read.

        Raises:
            DataError: As for a single window.
            IndexError: There is no such window.
        """
        rows = np.empty((len(indices), self._window), np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self._read(index)
        tokens = torch.from_numpy(rows)
        return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()] if self._target else tokens

    def _read(self, index: int) -> npt.NDArray[np.integer[Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        file = self._files[number]
        place = index - (self._ends[number - 1] if number else 0)
        size = file.dtype.itemsize
        data = self._reader.read(
            file.path,
            file.start + place * self._stride * size,
            self._window * size,
            what=f"sample {index}",
            sample=index,
        )
        return np.frombuffer(data, file.dtype)


def _integers(dtype: str, what: str) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iu":
        raise ConfigurationError(f'{what}={dtype!r} is no type of whole numbers.\nGive one, such as "uint16".')
    return found


def _open_raw(path: str, dtype: np.dtype[Any], header_bytes: int) -> _TokenFile:
    size = size_of(path)
    if size < header_bytes or (size - header_bytes) % dtype.itemsize:
        header = f", {header_bytes} of them a header" if header_bytes else ""
        raise DataError(
            f"{path} has {size} bytes{header}, which is no whole number of {dtype.name} tokens.\n"
            "It was cut short, or holds another type: restore it, or give the dtype that it was written with.",
            file=path,
        )
    return _TokenFile(path, dtype, header_bytes, (size - header_bytes) // dtype.itemsize)


def _open_npy(path: str) -> _TokenFile:
    size = size_of(path)
    with open(path, "rb") as file:
        try:
            shape, dtype = _read_header(file)
        except ValueError as error:
            raise DataError(
                f"{path} does not begin as a .npy file: {error}.\nWrite it with numpy.save.", file=path, offset=0
            ) from error
        start = file.tell()
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{path} holds an array of {dtype} in {len(shape)} dimensions.\nSave whole numbers in one dimension.",
            file=path,
        )
    expected = start + shape[0] * dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, but {expected} by its header ({shape[0]} tokens of {dtype.name}).\n"
            "It was cut short or is damaged: restore it.",
            file=path,
        )
    return _TokenFile(path, dtype, start, shape[0])


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a ``.npy`` file, and leave it where the data begin. Runs no code from the file."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version[0]}.{version[1]} is not for numbers")
    return shape, dtype
