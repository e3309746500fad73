"""Files of tokens (consecutive numbers) as data sets of windows, for language models."""

import glob
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import ConfigurationError, DataError

# One path, in which wildcards are expanded, or several.
Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# A quarter of the usual limit for a process; opening another file closes the oldest.
_MAX_OPEN = 256


class _Descriptor:
    """An open file that is closed with the last reference to this object."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _open(path: str) -> _Descriptor:
    return _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


class _TokenFile(NamedTuple):
    """A file of tokens, from its byte ``start`` on."""

    path: str
    dtype: np.dtype[Any]
    start: int
    num_tokens: int


class TokenFiles(Dataset[tuple[Tensor, Tensor] | Tensor]):
    """Windows of ``length`` tokens, each with the same window one token later: ``(inputs, targets)``, both int64.

    Windows begin at every ``stride``-th token of a file and end within it. Tokens after a file's last window are in no
    sample: fewer than ``stride`` of them, or all tokens of a file that is shorter than a window; `num_unused_tokens`
    counts them. Needs a few bytes for each file and no memory for each window. Can be pickled and forked.

    Args:
        files: A path, in which ``*``, ``?`` and ``[...]`` are expanded, or several. ``.npy`` files
            have their type in them; others are raw numbers.
        length: Tokens of a window.
        stride: Tokens from the begin of a window to the begin of the next; ``length`` if None, so that each token is
            an input once.
        dtype: The type of raw files: a numpy integer type in this machine's byte order, or a string like ``">u2"``.
        header_bytes: Bytes at the begin of each raw file that are not tokens.
        target: Whether to return ``(inputs, targets)``; else the samples are single tensors of ``length`` tokens.

    Raises:
        DataError: A file is missing, or its size does not match its type; names it.
        ConfigurationError: A number is out of range, or no file is long enough for a window.
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
        raw = _integers(dtype)
        names = [os.path.expanduser(path) for path in ([files] if isinstance(files, str | os.PathLike) else files)]
        self._files = [
            _open_npy(path) if path.endswith(".npy") else _open_raw(path, raw, header_bytes)
            for path in expand(map(os.fspath, names), _find)
        ]
        counts = [max(0, (file.num_tokens - self._window) // self._stride + 1) for file in self._files]
        self._ends = list(accumulate(counts))
        if not self._ends[-1]:
            longest = max(self._files, key=lambda file: file.num_tokens)
            raise ConfigurationError(
                f"No file contains a window of {self._window} tokens: the longest, {longest.path}, "
                f"has {longest.num_tokens}.\nMake length smaller."
            )
        self._open = lru_cache(_MAX_OPEN)(_open)

    @property
    def num_tokens(self) -> int:
        """Tokens in all files."""
        return sum(file.num_tokens for file in self._files)

    @property
    def num_unused_tokens(self) -> int:
        """Tokens after the last window of their file."""
        counts = [end - before for before, end in pairwise([0, *self._ends])]
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
        size = self._window * file.dtype.itemsize
        offset = file.start + place * self._stride * file.dtype.itemsize
        data = b""
        # Not mapped into memory: mapped pages count as the process's memory until the system reclaims them, and a file
        # that became shorter would end the process with SIGBUS. ``pread`` has no file position, so threads and forked
        # processes can share a descriptor.
        try:
            descriptor = self._open(file.path)  # referenced here: another thread may remove it from the cache
            while len(data) < size and (piece := os.pread(descriptor.number, size - len(data), offset + len(data))):
                data += piece
        except OSError as error:
            text = (
                f"{file.path} cannot be read at byte {offset}, for sample {index}: {error.strerror}.\n"
                "Check that the file is still there, and that this machine sees it."
            )
            raise DataError(text, file=file.path, offset=offset, sample=index) from error
        if len(data) < size:
            text = (
                f"{file.path} ends at byte {offset + len(data)}, but sample {index} lies at bytes {offset} to "
                f"{offset + size}.\nThe file was truncated after the data set was created. Restore it and resume."
            )
            raise DataError(text, file=file.path, offset=offset, sample=index)
        return np.frombuffer(data, file.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _open=lru_cache(_MAX_OPEN)(_open))  # another process opens its own


def _find(name: str) -> list[str]:
    is_pattern = glob.has_magic(name) and not os.path.exists(name)
    return list(map(os.path.abspath, sorted(glob.glob(name)) if is_pattern else [name]))


def expand(names: Iterable[str], find: Callable[[str], list[str]]) -> list[str]:
    """Return the paths that ``find`` returns for the names of data files.

    Raises:
        ConfigurationError: There are none, or one is named twice.
        DataError: No file has a name.
    """
    paths: list[str] = []
    for name in names:
        matches = find(name)
        if not matches:
            raise DataError(f"No file matches {name}.\nCheck the name, and that this machine sees the folder.")
        paths += matches
    if not paths:
        raise ConfigurationError("No files are given.\nGive the path of at least one.")
    path, times = Counter(paths).most_common(1)[0]
    if times > 1:
        raise ConfigurationError(f"{path} is given twice, so its samples would count twice.\nGive each file once.")
    return paths


def _integers(dtype: str) -> np.dtype[Any]:
    try:
        np_dtype = np.dtype(dtype)
    except TypeError:
        np_dtype = np.dtype(object)
    if np_dtype.kind not in "iu":
        raise ConfigurationError(f'dtype={dtype!r} is not an integer type.\nGive one, such as "uint16".')
    return np_dtype


def _unreadable(path: str, error: OSError) -> DataError:
    text = f"{path} cannot be read: {error.strerror}.\nCheck name and permissions, and that this machine sees the file."
    return DataError(text, file=path)


def _open_raw(path: str, dtype: np.dtype[Any], header_bytes: int) -> _TokenFile:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if size < header_bytes or (size - header_bytes) % dtype.itemsize:
        header = f", {header_bytes} of them a header" if header_bytes else ""
        raise DataError(
            f"{path} has {size} bytes{header}, which is not a whole number of {dtype.name} tokens.\n"
            "The file is truncated or has another dtype: restore it, or pass the dtype that it was written with.",
            file=path,
        )
    return _TokenFile(path, dtype, header_bytes, (size - header_bytes) // dtype.itemsize)


def _open_npy(path: str) -> _TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # reads the header, and compares it with the size
        if not isinstance(array, np.memmap):
            raise ValueError("it is an archive of several")
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, EOFError) as error:
        text = f"{path} is not a whole .npy file: {error}.\nWrite it with numpy.save, or restore it."
        raise DataError(text, file=path) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds an array of {array.dtype} in {array.ndim} dimensions.\nSave integers in one dimension.",
            file=path,
        )
    return _TokenFile(path, array.dtype, array.offset, len(array))
