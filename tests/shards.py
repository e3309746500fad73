"""Shards for tests: the same numbered samples in each format, and an object store that counts what is read from it."""

import io
import json
import os
import sys
import tarfile
import types
import warnings

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

SIZES = [7, 12, 0, 9, 13]


def write_tar(path, numbers):
    """Write a sample of two files for each number, the second of a length of its own."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            for name, content in (("txt", str(number).encode()), ("bin", bytes([number % 256]) * (700 + 40 * number))):
                member = tarfile.TarInfo(f"part.1/{number:06d}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_parquet(path, numbers, rows=4):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"number": pyarrow.array(numbers, pyarrow.int64()), "other": [str(each) for each in numbers]})
    parquet.write_table(table, path, row_group_size=rows)


WRITERS = {"tar": write_tar, "parquet": write_parquet}


def write_shards(folder, kind, sizes=SIZES):
    """Write shards of numbered samples; return a pattern that matches them."""
    folder.mkdir(exist_ok=True)
    start = 0
    for number, size in enumerate(sizes):
        WRITERS[kind](folder / f"{number}.{kind}", list(range(start, start + size)))
        start += size
    return f"{folder}/*.{kind}"


def number_of(sample):
    """Return the number of a sample of any of the formats."""
    return int(sample["txt"]) if "txt" in sample else sample["number"]


def counting_store(folder, log):
    """Return the URL of a store in ``folder``; it appends a line to ``log`` for each range of bytes that is read."""

    class CountingFileSystem(LocalFileSystem):
        protocol = "counted"

        def cat_file(self, path, start=None, end=None, **how):
            name = os.path.basename(path)
            with open(log, "a") as file:
                file.write(f"{name} {start} {end} {os.environ.get('RANK', 0)}\n")
            return super().cat_file(path, start, end, **how)

    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    return f"counted://{folder}"


def ranges_read(log):
    """Return what was read: names, begins, ends and ranks."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(name, int(start), int(end), int(rank)) for name, start, end, rank in lines]


def write_mds(folder, sizes=SIZES, **changes):
    """Write an MDS folder of numbered samples as MDSWriter does, apart from the header that a shard has for people."""
    folder.mkdir()
    columns = {"column_encodings": ["int", "bytes"], "column_names": ["number", "x"], "column_sizes": [8, None]}
    shards, start = [], 0
    for place, size in enumerate(size for size in sizes if size):
        samples = []
        for number in range(start, start + size):
            content = bytes([number]) * (900 + number)
            samples.append(np.uint32(len(content)).tobytes() + np.int64(number).tobytes() + content)
        begin = 4 * (size + 2)
        bounds = np.cumsum([begin, *map(len, samples)], dtype=np.uint32)
        data = b"".join([np.uint32(size).tobytes(), bounds.tobytes(), *samples])
        (folder / f"shard.{place:05d}.mds").write_bytes(data)
        raw = {"basename": f"shard.{place:05d}.mds", "bytes": len(data), "hashes": {}}
        shard = {"format": "mds", "version": 2, "compression": None, "hashes": [], "size_limit": None, "samples": size}
        shards.append({**shard, **columns, "raw_data": raw, "zip_data": None, **changes})
        start += size
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


class MDSReader:
    """What stands in for MosaicML's class where it is not installed."""

    @classmethod
    def from_json(cls, dirname, split, shard):
        made = cls()
        made.encodings = shard["column_encodings"]
        return made

    def validate(self, allow_unsafe_types):
        if "pkl" in self.encodings:
            raise ValueError("Column x contains an unsafe type: pkl.")

    def decode_sample(self, data):
        (size,) = np.frombuffer(data[:4], np.uint32)
        assert len(data) == 12 + size
        return {"number": int(np.frombuffer(data[4:12], np.int64)[0]), "x": data[12:]}


def standing_in_for_streaming(patch):
    """Make `MDSReader` importable where MosaicML's package is not installed, or cannot be imported."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import streaming.base.format.mds  # noqa: F401
    except ImportError:
        for name in ("streaming", "streaming.base", "streaming.base.format", "streaming.base.format.mds"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["streaming.base.format.mds"].MDSReader = MDSReader
