"""Loading from files that are larger than the process: its memory over time, and throughput against the peers' loaders.

Writes 2.5 GiB of files to a temporary folder, and removes them: tokens, rows of Parquet.

Memory: a process of its own for each loader reads all of its files once, in batches, in shuffled order where the loader
can. The figures are MiB of its resident set above that after the first batches, at tenths of the way.

Throughput: every round takes a few batches from each loader, in an order that rotates, so that whatever else the
machine does hits all alike. Milliseconds a batch, and the time divided by ours in the same round: above 1 we are
faster. Median and quartiles. All loaders give the same tensors, shuffled.
Files are in the page cache, but for the last table: there it was dropped, and the same loader reads in shuffled and in
file order.

Usage: python bench/data.py [--rounds N] [--megabytes N]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader, Dataset

from lockstep.data import TokenFiles
from lockstep.data.loader import LoadOptions, Request, load, train_requests
from lockstep.data.order import BatchSplit, GlobalOrder

LENGTH, BATCH = 1024, 32
ROW = 256  # floats of a row
BATCHES_A_ROUND = 40
COLD_ROUNDS = 5
MIB = 2**20


def write(folder: Path, megabytes: int) -> None:
    """Write ``megabytes`` of tokens, and an eighth of rows."""
    generator = np.random.default_rng(0)
    block = generator.integers(0, 50_000, MIB // 2, dtype=np.uint16).tobytes()
    with (folder / "tokens.bin").open("wb") as file:
        for _ in range(megabytes):
            file.write(block)
    num_rows = megabytes // 8 * MIB // (4 * ROW)
    schema = pyarrow.schema([("x", pyarrow.list_(pyarrow.float32(), ROW)), ("y", pyarrow.int64())])
    with parquet.ParquetWriter(folder / "rows.parquet", schema, compression="none") as file:
        for first in range(0, num_rows, 4096):
            values = generator.standard_normal(4096 * ROW, dtype=np.float32)
            x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values), ROW)
            y = pyarrow.array(range(first, first + 4096), pyarrow.int64())
            file.write_table(pyarrow.table([x, y], schema))
    datasets.disable_progress_bars()
    rows_of(folder)


class MappedTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The windows of a mapped file, as trainers of language models read them."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a window, and the same one token later."""
        window = torch.from_numpy(self.tokens[index * LENGTH : (index + 1) * LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def ours(samples: Any, workers: int, shuffle: bool = True) -> Iterator[Any]:
    """Load as ``fit`` does."""
    split = BatchSplit(1, range(1), 1)
    requests: Iterable[Request] = train_requests(GlobalOrder(len(samples), BATCH, 0), split, 0)
    if not shuffle:
        starts = range(0, len(samples) - BATCH, BATCH)
        requests = [Request(0, 0, BATCH, {0: list(range(start, start + BATCH))}) for start in starts]
    batches = load(samples, requests, LoadOptions(None, workers, pin_memory=False), seed=0)
    return (micro.batches[0] for micro in batches)


def torchs(samples: Any, workers: int) -> Iterator[Any]:
    """Load with torch's own loader, epoch after epoch."""
    loader = DataLoader(samples, BATCH, shuffle=True, num_workers=workers, drop_last=True)
    while True:
        yield from loader


def rows_of(folder: Path) -> Any:
    """Return the rows of the Parquet file, as tensors."""
    path, cache = str(folder / "rows.parquet"), str(folder / "cache")
    return datasets.Dataset.from_parquet(path, cache_dir=cache).with_format("torch")


Open = Callable[[Path, int], Iterator[Any]]
GROUPS: dict[str, dict[str, Open]] = {
    f"tokens: {BATCH} windows of {LENGTH}": {
        "TokenFiles": lambda folder, workers: ours(TokenFiles(folder / "tokens.bin", length=LENGTH), workers),
        "DataLoader over np.memmap": lambda folder, workers: torchs(MappedTokens(folder / "tokens.bin"), workers),
    },
    f"Parquet: {BATCH} rows of {ROW} floats": {
        "datasets in fit": lambda folder, workers: ours(rows_of(folder), workers),
        "DataLoader over datasets": lambda folder, workers: torchs(rows_of(folder), workers),
    },
}
LOADERS = {name: make for group in GROUPS.values() for name, make in group.items()}


def num_batches(name: str, folder: Path) -> int:
    """Return how many batches the files hold that a loader reads."""
    if name in ("TokenFiles", "DataLoader over np.memmap"):
        return len(MappedTokens(folder / "tokens.bin")) // BATCH
    return len(rows_of(folder)) // BATCH


def stream(name: str, folder: Path) -> None:
    """Read everything once, and print the resident set above that at the beginning, at every tenth, as JSON."""
    process, batches, total = psutil.Process(), LOADERS[name](folder, 0), num_batches(name, folder)
    for _ in range(20):
        next(batches)
    before, grown = process.memory_info().rss, [0.0]
    for number in range(20, total):
        next(batches)
        if (number + 1) * 10 // total > len(grown) - 1:
            grown.append((process.memory_info().rss - before) / MIB)
    print(json.dumps({"before": before / MIB, "grown": grown}))


def memory_table(folder: Path) -> None:
    files = {"TokenFiles": "tokens.bin", "datasets in fit": "rows.parquet"}
    print("memory: MiB of the resident set above the start, at tenths of the way")
    print(f"{'':28}{'start':>7}" + "".join(f"{10 * tenth:>6}%" for tenth in range(11)))
    for group in GROUPS.values():
        pattern = files[next(iter(group))]
        print(f"{sum(path.stat().st_size for path in folder.glob(pattern)) / MIB:,.0f} MiB in {pattern}")
        for name in group:
            command = [sys.executable, __file__, "--stream", name, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            found = json.loads(done.stdout)
            print(f"  {name:26}{found['before']:7.0f}" + "".join(f"{grown:7.1f}" for grown in found["grown"]))


def time_batches(batches: Iterator[Any]) -> float:
    """Return milliseconds a batch."""
    start = time.perf_counter()
    for _ in range(BATCHES_A_ROUND):
        next(batches)
    return (time.perf_counter() - start) / BATCHES_A_ROUND * 1e3


def race(contenders: dict[str, Iterator[Any]], rounds: int) -> None:
    """Run the rounds and print a line for each contender; the first is what the others are divided by."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(time_batches(contenders[name]))
    first = times[names[0]]
    for name in names:
        ratios = [one / other for one, other in zip(times[name][1:], first[1:], strict=True)]  # without the warm-up
        low, middle, high = statistics.quantiles(ratios, n=4)
        ratio = "" if name == names[0] else f"{middle:14.2f}   {low:.2f} to {high:.2f}"
        print(f"  {name:26}{statistics.median(times[name][1:]):10.2f}{ratio}")


def drop_cache(folder: Path) -> None:
    for path in folder.glob("*.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Write the files, measure, print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--stream", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.stream:
        stream(args.stream[0], Path(args.stream[1]))
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        write(folder, args.megabytes)
        memory_table(folder)
        for workers in (0, 2):
            print(f"\nthroughput, {workers or 'no'} loader processes, {args.rounds} rounds")
            print(f"{'':28}{'ms a batch':>10}{'time / ours':>14}   quartiles")
            for title, group in GROUPS.items():
                print(title)
                race({name: make(folder, workers) for name, make in group.items()}, args.rounds)
        print(f"\norder of reading, page cache dropped before, {COLD_ROUNDS} rounds of {BATCHES_A_ROUND} batches")
        print(f"{'':28}{'ms a batch':>10}{'time / file order':>18}   quartiles")
        samples = TokenFiles(folder / "tokens.bin", length=LENGTH)
        drop_cache(folder)
        race({"file order": ours(samples, 0, shuffle=False), "shuffled": ours(samples, 0)}, COLD_ROUNDS)


if __name__ == "__main__":
    main()
