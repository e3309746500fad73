"""Data sets in shards (Parquet, tar, MDS), local or in an object store, of which each rank reads its own parts.

[Note: pieces]
Each shard is divided into pieces: the row groups of a Parquet file, and about `_PIECE_BYTES` of another. Local files
whose samples can be read one by one are read directly. Other pieces are fetched into a folder that all processes of a
machine share: one process fetches a piece and the others wait for it. A row group is decoded there, into small batches
of which readers read one for each row. Threads fetch ahead what follows in the order. A piece ends where a lane of the
order ends, since another rank reads the rest. Only a row group cannot be divided: both ranks read it if a lane ends in
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.base.env import file_system_of
from lockstep.data.order import ShardOrder, shard_sequence
from lockstep.data.tokens import expand
from lockstep.errors import ConfigurationError, DataError

T = TypeVar("T")
_Numbers = NDArray[np.int64]

# A request to an object store takes as long as the transfer of some MiB.
_PIECE_BYTES = 8 << 20

# Bytes of a column that are read for a row of Parquet.
_BATCH_BYTES = 4 << 10

# Unfinished files that nobody has written to for so long may be of a killed process.
_ABANDONED_S = 60.0

# Threads that index shards, and threads of each process that fetch pieces ahead.
_NUM_INDEXING, _NUM_AHEAD = 16, 2


@runtime_checkable
class HasShardOrder(Protocol):
    """A data set that is read in an order of its own."""

    def make_order(self, batch_size: int, seed: int, *, drop_last: bool) -> ShardOrder:
        """Return the order of its global batches, in which it will be read."""


@contextlib.contextmanager
def _naming(path: str, where: str = "", *, offset: int | None = None, sample: int | None = None) -> Iterator[None]:
    """Inside the block, turn errors of reading a file into a `DataError`."""
    try:
        yield
    except ConfigurationError:  # a ValueError
        raise
    except (OSError, ValueError, LookupError, EOFError, tarfile.TarError) as error:  # of pyarrow's, too
        raise DataError(
            f"{path} cannot be read{where}: {error}.\n"
            "It is damaged, was changed after the data set was created, or is out of reach. Restore it.",
            file=path,
            offset=offset,
            sample=sample,
        ) from error


def _require(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"The shards cannot be read without {package}: {error}.\nInstall it on all machines: pip install {package}."
        ) from error


# --- Formats


class _Place(NamedTuple):
    """Where a sample is.

    Args:
        store: The file system of fsspec.
        path: The path of the shard there.
        bounds: The bytes of the shard at which samples begin, and the end of the last; of Parquet, the rows of groups.
        offset: Number of the sample in the shard.
        piece: Samples of its piece.
        name: The name of the piece in the cache.
        lane: Number of its lane, and of its window in the lane.
    """

    store: Any
    path: str
    bounds: _Numbers
    offset: int
    piece: range
    name: str
    lane: tuple[int, int]


@dataclass(frozen=True)
class _ByteFormat:
    """A format in which each sample is a range of bytes.

    Args:
        index: Maps the file system and the path of a shard to the number of its samples, its bounds, and its bytes.
        parse: Maps the bytes of a sample to the sample.
    """

    index: Callable[[Any, str], tuple[int, _Numbers, int]]
    parse: Callable[[bytes], dict[str, Any]]
    has_bytes = True

    def piece(self, bounds: _Numbers, offset: int) -> range:
        """Return the samples of the piece with sample ``offset``."""
        begin = bounds[offset] // _PIECE_BYTES * _PIECE_BYTES
        return range(*np.searchsorted(bounds[:-1], (begin, begin + _PIECE_BYTES)).tolist())

    def fetch(self, place: _Place, target: Path) -> None:
        """Write a piece to a local file. Blocks."""
        begin, end = int(place.bounds[place.piece.start]), int(place.bounds[place.piece.stop])
        target.write_bytes(_whole(place.store.cat_file(place.path, start=begin, end=end), begin, end))

    def read(self, place: _Place, path: str) -> dict[str, Any]:
        """Return a sample from a local file: the shard itself, or a piece of it."""
        begin, end = place.bounds[place.offset : place.offset + 2].tolist()
        base = 0 if path == place.path else int(place.bounds[place.piece.start])
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(file, end - begin, begin - base)
        finally:
            os.close(file)
        return self.parse(_whole(data, begin, end))


def _whole(data: bytes, begin: int, end: int) -> bytes:
    if len(data) < end - begin:
        raise EOFError(f"it ends at byte {begin + len(data)}")
    return data


_MDS_COLUMNS = "column_names", "column_encodings", "column_sizes"

# As in webdataset: the key ends at the first dot of a file's name.
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")


def _tar_files(file: Any, end: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name, the begin, the begin of the content, and the size of each file of an archive.

    Links, folders and devices are left out, as in webdataset. Plain headers are read here, in a fifth of the time of
    `tarfile`, which reads the archive from the first other header on.

    Args:
        file: The archive, or a part of it.
        end: What follows the last file.
    """
    at = 0
    while (plain := _plain_header(file.read(tarfile.BLOCKSIZE))) is not None:
        name, size = plain
        yield name, at, at + tarfile.BLOCKSIZE, size
        at += tarfile.BLOCKSIZE + _padded(size)
        file.seek(at)
    file.seek(at)
    if not at or file.read(tarfile.BLOCKSIZE) != end:
        file.seek(at)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.issparse():
                    raise ValueError(f"{member.name} is a sparse file; write the archive without --sparse")
                if member.isfile():
                    yield member.name, member.offset, member.offset_data, member.size
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != end:  # tarfile does not check it
                raise EOFError(f"at byte {tar.offset} there is neither a file nor the end of the archive")


def _plain_header(header: bytes) -> tuple[str, int] | None:
    """Return the name and the size of a file; None if the header is of anything else, or has extensions."""
    if len(header) < tarfile.BLOCKSIZE or header[156:157] not in (b"0", b"\0") or header[345]:
        return None
    try:
        size, checksum = (int(field.partition(b"\0")[0], 8) for field in (header[124:136], header[148:156]))
    except ValueError:
        return None
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != checksum:
        return None
    return os.fsdecode(header[:100].partition(b"\0")[0]), size


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _index_tar(store: Any, path: str) -> tuple[int, _Numbers, int]:
    """Consecutive files with the same key are a sample, as in webdataset."""
    starts, key, end = [], None, 0
    with store.open(path, "rb") as file:
        for name, start, begin, size in _tar_files(file, bytes(tarfile.BLOCKSIZE)):
            if match := _KEY.fullmatch(name):
                if match[1] != key:
                    starts.append(start)
                key, end = match[1], begin + _padded(size)
    return len(starts), np.array([*starts, end]), end


def _parse_tar(data: bytes) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    for name, _, begin, size in _tar_files(io.BytesIO(data), b""):
        if match := _KEY.fullmatch(name):
            if sample.setdefault("__key__", match[1]) != match[1]:
                raise ValueError(f"{name} is not a file of sample {sample['__key__']}")
            sample[match[2].lower()] = _whole(data[begin : begin + size], begin, begin + size)
    return sample


@dataclass(frozen=True)
class _Parquet:
    """Rows are samples, and row groups are pieces; otherwise as `_ByteFormat`."""

    columns: list[str] | None
    has_bytes = False

    def index(self, store: Any, path: str) -> tuple[int, _Numbers, int]:
        footer = _footer(store, path)
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        rows = np.cumsum([0, *(group.num_rows for group in groups)])
        return int(rows[-1]), rows, sum(group.total_byte_size for group in groups)

    def piece(self, bounds: _Numbers, offset: int) -> range:
        number = int(bounds.searchsorted(offset, "right"))
        return range(*bounds[number - 1 : number + 1].tolist())

    def fetch(self, place: _Place, target: Path) -> None:
        pyarrow, parquet = _require("pyarrow", "pyarrow"), _require("pyarrow.parquet", "pyarrow")
        number = int(np.searchsorted(place.bounds, place.offset, side="right")) - 1
        with place.store.open(place.path, "rb") as file:
            opened = parquet.ParquetFile(file, metadata=_footer(place.store, place.path), pre_buffer=True)
            table = opened.read_row_group(number, columns=self.columns, use_threads=False).combine_chunks()
        rows = max(1, table.num_rows * table.num_columns * _BATCH_BYTES // max(1, table.nbytes))
        with pyarrow.OSFile(str(target), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)

    def read(self, place: _Place, path: str) -> dict[str, Any]:
        reader, rows, names = _open_row_group(path)
        number, row = divmod(place.offset - place.piece.start, rows)
        return {name: column[row].as_py() for name, column in zip(names, reader.get_batch(number).columns, strict=True)}


# Opening takes ten times as long as reading a row. Row groups of all lanes of a rank are in use at once.
@lru_cache(maxsize=256)
def _open_row_group(path: str) -> tuple[Any, int, list[str]]:
    """Return the reader of a fetched row group, the rows of its batches (the last may have fewer), and its columns."""
    pyarrow = _require("pyarrow", "pyarrow")
    reader = pyarrow.ipc.open_file(pyarrow.OSFile(path))
    return reader, reader.get_batch(0).num_rows, reader.schema.names


@lru_cache(maxsize=16)
def _footer(store: Any, path: str) -> Any:
    parquet = _require("pyarrow.parquet", "pyarrow")
    with store.open(path, "rb") as file:
        return parquet.read_metadata(file)


_Format = _ByteFormat | _Parquet


def _index_mds(store: Any, path: str) -> tuple[int, _Numbers, int]:
    (number,) = np.frombuffer(store.cat_file(path, start=0, end=4), "<u4").tolist()
    bounds = np.frombuffer(store.cat_file(path, start=4, end=4 * number + 8), "<u4").astype(np.int64)
    return number, bounds, int(bounds[number])


def _open_shards(store: Any, paths: list[str], columns: Sequence[str] | None) -> tuple[list[str], _Format]:
    """Return the paths of the shards, of MDS the shards that are listed in ``paths``, and their format."""
    suffixes = {os.path.splitext(path)[1] for path in paths}
    if suffixes == {".parquet"}:
        return paths, _Parquet(None if columns is None else list(columns))
    if suffixes == {".tar"}:
        return paths, _ByteFormat(_index_tar, _parse_tar)
    if suffixes != {".json"}:
        raise ConfigurationError(
            f"Shards that end in {' and '.join(map(repr, sorted(suffixes)))} cannot be read.\n"
            "Give .parquet files, uncompressed .tar files, or folders of MDS; all of the same kind."
        )
    shards = []
    for path in paths:
        with _naming(path):
            shards += [(os.path.dirname(path), shard) for shard in json.loads(store.cat_file(path))["shards"]]
    layouts = [{key: shard.get(key) for key in ("format", "compression", *_MDS_COLUMNS)} for _, shard in shards]
    if layouts[0] | {"format": "mds", "compression": None} != layouts[0] or layouts.count(layouts[0]) < len(layouts):
        raise ConfigurationError(
            f"{paths[0]} lists shards that are compressed, of different columns, or not MDS.\n"
            "Write them with MDSWriter without compression."
        )
    reader = _require("streaming.base.format.mds", "mosaicml-streaming").MDSReader.from_json("", None, shards[0][1])
    try:
        reader.validate(False)
    except ValueError as error:
        raise ConfigurationError(f"{paths[0]}: {error}\nWrite the column with another encoding.") from error
    urls = [f"{folder}/{shard['raw_data']['basename']}" for folder, shard in shards]
    return urls, _ByteFormat(_index_mds, reader.decode_sample)


# --- The index


class _Index(NamedTuple):
    """What is known of all shards; in arrays, which loader processes do not copy.

    Args:
        sizes: The number of samples of each shard.
        bounds: The bounds of all shards, one after the other.
        ends: Where the bounds of each shard end.
        num_bytes: The bytes of each shard.
    """

    sizes: _Numbers
    bounds: _Numbers
    ends: _Numbers
    num_bytes: _Numbers


def _make_index(store: Any, paths: Sequence[str], made_by: _Format, target: Path) -> None:
    """Read the headers of all shards, and write the index to a file."""

    def index(shard: str) -> tuple[int, _Numbers, int]:
        with _naming(shard):
            return made_by.index(store, shard)

    with ThreadPoolExecutor(_NUM_INDEXING) as pool:
        sizes, bounds, num_bytes = zip(*pool.map(index, paths), strict=True)
    made = _Index(np.array(sizes), np.concatenate(bounds), np.cumsum([*map(len, bounds)]), np.array(num_bytes))
    with target.open("wb") as file:
        np.savez(file, **made._asdict())


def _read_index(path: str) -> _Index:
    try:
        with open(path, "rb") as file, np.load(file) as saved:
            return _Index(*(saved[name] for name in _Index._fields))
    except (ValueError, LookupError, EOFError, BadZipFile) as error:  # as after a crash of the machine
        Path(path).unlink(missing_ok=True)
        raise FileNotFoundError(path) from error  # it is made again


# --- The cache


@lru_cache(maxsize=256)
def _touch(path: str) -> None:
    """Mark a file of a cache as used; not for each sample, as this takes as long as to read one."""
    with contextlib.suppress(PermissionError):  # it belongs to another user
        os.utime(path)


class _PieceCache:
    """Files in a folder, fetched when they are needed; the least recently used are removed.

    Args:
        folder: Other processes may use it at the same time.
        max_bytes: The size of all files; files that are being fetched are not counted.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def read(self, name: str, fetch: Callable[[Path], None], read: Callable[[str], T]) -> T:
        """Return what ``read`` makes of a file. Blocks until it is fetched.

        If the fetch fails in one process, those that waited try it themselves, and get the error, too.
        """
        path = f"{self._folder}/{name}"
        while True:
            try:
                _touch(path)
                return read(path)
            except FileNotFoundError:  # also if it was removed after it was fetched
                self.fetch(name, fetch)

    def fetch(self, name: str, fetch: Callable[[Path], None], *, waits: bool = True) -> None:
        """Fetch a file if it is absent; without ``waits``, not if another process or thread fetches it."""
        path, part = self._folder / name, self._folder / f"{name}.part"
        if path.exists():
            return
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Otherwise who had the lock before has renamed the file, which may have been removed since, or failed.
            if not path.exists() and os.fstat(file).st_nlink:
                try:
                    fetch(part)
                    part.rename(path)
                except BaseException:
                    part.unlink()
                    raise
                self._remove_oldest()
        except BlockingIOError:
            return
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file, too
            os.close(file)

    def _remove_oldest(self) -> None:
        """Remove the least recently used files beyond the limit, and what killed processes were fetching."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # it is gone, is being fetched, or belongs to another user
                state = path.stat()
                if path.suffix != ".part":
                    files.append((state.st_mtime_ns, state.st_size, path))
                elif time.time() - state.st_mtime > _ABANDONED_S:  # others fetch ahead, and pass over what is locked
                    with path.open("rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who fetches has the lock
                        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                            path.unlink()
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files)[:-1]:  # never the one that was just fetched
            if excess > 0:
                path.unlink(missing_ok=True)
                excess -= size


# --- The data set

# A path or URL, or several.
Shards = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class ShardedDataset(Dataset[Any]):
    """The samples of shards that may be larger than the disk: Parquet files, tar files as of webdataset, or MDS.

    In `fit`, shards are permuted as a whole and their samples within windows. Each rank reads its own parts of the
    shards, once an epoch. Any other use reads samples by index. Needs 8 bytes of memory for each sample that is not a
    row of Parquet, shared with loader processes. Can be pickled and forked.

    A sample is a dictionary: the columns of a row; of a tar file, ``__key__`` and the bytes of its files by extension.

    Args:
        shards: Paths, or URLs of fsspec such as ``s3://bucket/train-*.tar``; ``*``, ``?`` and ``[...]`` are expanded.
            Of MDS the folder with ``index.json``, which must not be compressed.
        decode: Maps the dictionary to the sample. Random numbers are seeded for it.
        columns: The columns of Parquet files to read; all if None.
        window: Consecutive samples of a lane that are permuted.
        lanes: Parts of the data set of which each gives samples to each global batch; at most as many ranks can read
            it. The order depends on it.
        cache_dir: Local folder for the index of the shards, for which all headers are read once, and for parts of
            Parquet files and of remote files. All processes of a machine share it. In the folder for temporary files if
            None.
        cache_bytes: Size of these parts.

    Raises:
        ConfigurationError: There are no samples, the format is unknown, or a package is missing.
        DataError: A shard cannot be read; names it.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        columns: Sequence[str] | None = None,
        window: int = 512,
        lanes: int = 48,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 16 << 30,
    ) -> None:
        for name, value in (("window", window), ("lanes", lanes)):
            if value < 1:
                raise ConfigurationError(f"{name}={value} is too small.\nGive at least 1.")
        self._decode, self._window, self._num_lanes, self._cache_bytes = decode, window, lanes, cache_bytes
        listed = [shards] if isinstance(shards, str | os.PathLike) else shards
        urls = [os.path.expanduser(os.fspath(path)) for path in listed]
        _footer.cache_clear()  # this process may have read files of the same names that were written again since
        store, paths = _open_store(urls)
        paths, self._format = _open_shards(store, paths, columns)
        self._url, self._paths = urls[0], np.array(paths)
        folder = Path(cache_dir or f"{tempfile.gettempdir()}/lockstep-shards-{os.getuid()}").absolute()
        self._cache = _PieceCache(folder / "pieces", cache_bytes)
        (folder / "pieces").mkdir(parents=True, exist_ok=True, mode=0o700)
        if cache_dir is None and folder.stat().st_uid != os.getuid():  # everybody may write beside it
            raise ConfigurationError(f"{folder} belongs to another user.\nName another folder as cache_dir.")
        version = json.dumps([columns, *((path, store.ukey(path)) for path in paths)])
        self._version = blake2b(version.encode(), digest_size=8).hexdigest()
        # Of the ranks of a machine, one makes the index, and the others wait and read it.
        make = partial(_make_index, store, paths, self._format)
        self._index = _PieceCache(folder, sys.maxsize).read(f"index-{self._version}.npz", make, _read_index)
        self._ends = np.cumsum(self._index.sizes)
        if not len(self):
            raise ConfigurationError(f"There are no samples in {paths[0]}, or in others.\nGive shards with samples.")
        protocols = [store.protocol] if isinstance(store.protocol, str) else store.protocol
        self._is_direct = isinstance(self._format, _ByteFormat) and "file" in protocols
        self._order: ShardOrder | None = None
        self._epoch, self._ahead = 0, dict[int, tuple[int, int]]()  # of each lane, the epoch and the window

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1])

    def make_order(self, batch_size: int, seed: int, *, drop_last: bool) -> ShardOrder:
        """Return the order of global batches in which `fit` will read it.

        Raises:
            ConfigurationError: The cache is too small for a window of each lane.
        """
        lanes = min(self._num_lanes, batch_size)
        # A row group is in the cache as a whole.
        least = 0 if self._format.has_bytes else len(self) // (len(self._index.bounds) - len(self._paths))
        needed = int(self._index.num_bytes.sum()) * max(self._window, least) * lanes // len(self)
        if not self._is_direct and needed > self._cache_bytes:
            raise ConfigurationError(
                f"cache_bytes={self._cache_bytes} is too small: {lanes} windows of {self._window} samples have about "
                f"{needed} bytes.\nIncrease cache_bytes, or decrease window or lanes."
            )
        self._order = ShardOrder(self._index.sizes, batch_size, seed, drop_last, self._window, lanes)
        return self._order

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next samples, which determines what is fetched ahead."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        """Return a sample. Blocks until it is read.

        Raises:
            DataError: The shard has changed, or cannot be read; names it, the place and the sample.
            IndexError: There is no such sample.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return next(self.each([index % len(self)]))

    def each(self, indices: list[int]) -> Iterator[Any]:
        """Return the samples at ``indices``; each is read when it is asked for, also after one that cannot be read."""
        return map(self._read, indices, self._places(np.array(indices), self._epoch))

    def _read(self, index: int, place: _Place) -> Any:
        lane, window = place.lane
        if self._order is not None and not self._is_direct and self._ahead.get(lane) != (self._epoch, window):
            self._ahead[lane] = self._epoch, window
            _open_row_group.cache_clear()  # files that were removed since keep their space while they are open
            _touch.cache_clear()
            # A daemon, because the process may end while it fetches.
            what = self._order, self._epoch, lane, window
            threading.Thread(target=self._fetch, args=what, daemon=True, name=_AHEAD).start()
        byte = int(place.bounds[place.offset]) if self._format.has_bytes else None
        where = f" at {f'row {place.offset}' if byte is None else f'byte {byte}'}, for sample {index}"
        with _naming(place.path, where, offset=byte, sample=index):
            if self._is_direct:
                sample = self._format.read(place, place.path)
            else:
                fetch, read = partial(self._format.fetch, place), partial(self._format.read, place)
                sample = self._cache.read(place.name, fetch, read)
        try:
            return sample if self._decode is None else self._decode(sample)
        except Exception as error:
            error.add_note(f"decode raised it for sample {index}, {place.path}{where.partition(',')[0]}.")
            raise

    def _places(self, indices: _Numbers, epoch: int) -> Iterator[_Place]:
        """Yield the places of samples; of all at once, for a fifth of the time."""
        numbers = self._ends.searchsorted(indices, "right")
        stops, begins = self._index.ends[numbers], self._ends[numbers] - self._index.sizes[numbers]
        order = None if self._is_direct else self._order
        # In the sequence of the epoch: where the shards begin, and where lanes begin and end.
        starts = begins if order is None else shard_sequence(order, epoch)[1][numbers]
        lane_starts = np.array([0, len(self)]) if order is None else order.lane_starts
        lanes = lane_starts.searchsorted(starts + indices - begins, "right") - 1
        firsts, lasts = lane_starts[lanes] - starts, lane_starts[lanes + 1] - starts
        columns = numbers, indices - begins, self._index.ends[numbers - 1] * (numbers > 0), stops, lanes, firsts, lasts
        store = _store_of(self._url, os.getpid())
        for number, offset, start, stop, lane, first, last in np.stack(columns, 1).tolist():
            bounds = self._index.bounds[start:stop]
            piece = range(offset, offset + 1) if self._is_direct else self._format.piece(bounds, offset)
            if self._format.has_bytes:
                piece = range(max(first, piece.start), min(last, piece.stop))
            name = f"{self._version}-{number}-{piece.start}-{piece.stop}"
            window = lane, (offset - first) // self._window
            yield _Place(store, str(self._paths[number]), bounds, offset, piece, name, window)

    def _fetch(self, order: ShardOrder, epoch: int, lane: int, window: int) -> None:
        """Fetch the pieces of a window and of the next, which after the last of an epoch is the first of the next."""
        begin, end = order.lane_starts[lane : lane + 2].tolist()
        start = begin + window * self._window
        stop = start + 2 * self._window
        parts = [(epoch, start, min(stop, end))]
        if stop - self._window >= end:
            parts += [(epoch + 1, begin, min(begin + self._window, end))]
        with _fetching_ahead(os.getpid()), contextlib.suppress(Exception):  # who needs the piece gets the error
            for epoch_of_part, position, stop in parts:
                while position < stop and self._epoch in (epoch, epoch_of_part):
                    index = order.indices(epoch_of_part, np.array([position]))
                    (place,) = self._places(index, epoch_of_part)
                    self._cache.fetch(place.name, partial(self._format.fetch, place), waits=False)
                    position += place.piece.stop - place.offset


_AHEAD = "lockstep-shards"  # the name of the threads


@lru_cache(maxsize=1)
def _fetching_ahead(_pid: int) -> threading.Semaphore:
    """Return a semaphore of this process: a lock that was taken in a thread would stay taken after a fork."""
    return threading.Semaphore(_NUM_AHEAD)


@lru_cache(maxsize=8)
def _store_of(url: str, _pid: int) -> Any:
    """Return the file system of a URL; one for each process, because connections do not survive a fork."""
    return file_system_of(url)


def _open_store(urls: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the file system, and the paths in it of all shards.

    Raises:
        ConfigurationError: There are none, one is named twice, or there are several file systems.
        DataError: No file has a name.
    """
    stores = [_store_of(url, os.getpid()) for url in urls]
    for store in stores[:1]:
        store.invalidate_cache()  # of listings
    if not urls or any(store != stores[0] for store in stores):
        raise ConfigurationError("The shards are in no or several object stores.\nGive the shards of one store.")

    def find(url: str) -> list[str]:
        with _naming(url):
            return sorted(stores[0].glob(f"{url}/index.json" if stores[0].isdir(url) else url))

    return stores[0], expand(urls, find)
