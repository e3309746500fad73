"""Shards for tests: the same numbered samples in each format, and an object store that counts what is read from it."""

import io
import os
import tarfile

import fsspec
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

        def ls(self, path, detail=False, **how):
            return super().ls(path, detail=detail, **how)

    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    return f"counted://{folder}"


def ranges_read(log):
    """Return what was read: names, begins, ends and ranks."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(name, int(start), int(end), int(rank)) for name, start, end, rank in lines]
