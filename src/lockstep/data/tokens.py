"""Files of tokens, one number after the other, as data sets of windows: for language models.

The files are what trainers of language models write: raw numbers (``.bin``), or numpy's ``.npy``. Nothing is loaded but
the window that is asked for, so that the length of the files does not matter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.file_names import Files, expand
from lockstep.data.positional import PositionalReader, size_of
from lockstep.errors import ConfigurationError, DataError


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
