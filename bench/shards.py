"""Data sets in shards: what each rank reads, time to the first batch after a resume, and memory, beside the peers.

Writes the same samples as tar, Parquet and MDS to a temporary folder, and removes them.

Reading: an epoch on 1 to 4 ranks with 2 loader processes each, from a store that counts the bytes of each request. The
digest is of all global batches: it must not depend on the number of ranks. Not counted are the headers of the tar
files, which are read once more for the index.

Throughput: one rank with 0, 1 and 2 loader processes reads the shuffled epoch of local files from its begin. The table
has its samples a second after the first batch, the seconds to the first batch, without imports, and the processor time
of the rank without its loader processes, which depends less on other work of the machine. The index of a ShardedDataset
was made before, as MosaicML's was by its writer.

Resume and memory: 2 processes stand for 2 ranks, with 2 loader processes each. Each continues at a quarter of an epoch
of local files. The table has the seconds to the first batch (of the slower rank), and the memory of ranks and loader
processes together after 8 more batches: PSS, in which shared pages count once. `datasets` and WebDataset skip, which
reads what was before; MosaicML Streaming loads its state.

Medians; behind each peer's, its figure divided by ours of the same files in the same round, with the range of the
median. The contenders take turns, each in new processes. A peer that is not installed is left out.

Usage: python bench/shards.py [--quick] [--rounds N] [--json FILE]
"""

import hashlib
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import torch
from fsspec.implementations.local import LocalFileSystem

from bench.harness import order_of_round, parser, record
from lockstep.data import shards
from lockstep.data.loader import LoadOptions, MicroBatch, load, train_requests
from lockstep.data.order import BatchSplit
from lockstep.data.shards import ShardedDataset
from lockstep.study.common import Spread, paired_ratio

SAMPLE_BYTES, BATCH, WORKERS, NUM_RANKS, NUM_BATCHES = 8192, 96, 2, 2, 8
MAX_S = 5.0  # after which a slow contender reads no more batches
MIB = 2**20
Start = Callable[[Path, int, int], Iterator[Any]]  # from folder, step and number of loader processes


def write(folder: Path, num_shards: int, samples_of_shard: int) -> None:
    """Write the samples in each format for which there is a writer here."""
    from pyarrow import Table, array, parquet

    generator = np.random.default_rng(0)
    for kind in ("tar", "parquet"):
        (folder / kind).mkdir()
    mds = None
    if find_spec("streaming"):
        from streaming import MDSWriter

        size = samples_of_shard * (SAMPLE_BYTES + 20)
        mds = MDSWriter(out=str(folder / "mds"), columns={"x": "bytes", "y": "int"}, size_limit=size)
    for shard in range(num_shards):
        values = [generator.bytes(SAMPLE_BYTES) for _ in range(samples_of_shard)]
        numbers = range(shard * samples_of_shard, (shard + 1) * samples_of_shard)
        table = Table.from_pydict({"x": array(values), "y": array(numbers)})
        parquet.write_table(table, folder / f"parquet/{shard:04d}.parquet", row_group_size=256, compression="none")
        with tarfile.open(folder / f"tar/{shard:04d}.tar", "w") as tar:
            for number, value in zip(numbers, values, strict=True):
                for name, content in (("x", value), ("y", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:08d}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                if mds is not None:
                    mds.write({"x": value, "y": number})
    if mds is not None:
        mds.finish()


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return a sample as tensors."""
    return torch.frombuffer(bytearray(sample["x"]), dtype=torch.uint8), int(sample["y"])


class CountingFileSystem(LocalFileSystem):
    """Local files as an object store: appends the bytes of each request to a file."""

    protocol = "counted"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **how: Any) -> bytes:
        """Return a range of a file."""
        data: bytes = super().cat_file(path, start, end, **how)
        with open(os.environ["COUNTED"], "a") as file:
            file.write(f"{len(data)}\n")
        return data


def epoch_of(folder: Path, num_ranks: int, rank: int) -> tuple[list[list[int]], int, int]:
    """Return what a rank gets of an epoch of an object store; its bytes and its requests."""
    log, cache = folder / f"log-{num_ranks}-{rank}", folder / f"cache-{num_ranks}-{rank}"
    os.environ["COUNTED"] = str(log)
    data = ShardedDataset(f"counted://{folder}/tar/*.tar", decode=decode, cache_dir=cache)
    order = data.make_order(BATCH, 0, drop_last=False)
    split = BatchSplit(num_ranks, range(rank, rank + 1), 1, None, order.num_lanes)
    requests = itertools.islice(train_requests(order, split, 0), order.steps_per_epoch)
    micros = load(data, requests, LoadOptions(None, WORKERS, pin_memory=False), seed=0)
    batches = [micro.batches[0][1].tolist() if micro.batches else [] for micro in micros]
    sizes = [int(line) for line in log.read_text().split()]
    return batches, sum(sizes), len(sizes)


def reading(folder: Path) -> list[dict[str, Any]]:
    """Print and return what each rank reads of an epoch."""
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    shards._fetching_ahead = lambda _pid: threading.Semaphore(0)  # otherwise parts of the next epoch would count, too
    index = ShardedDataset(f"{folder}/tar/*.tar", cache_dir=folder / "cache")
    total = int(index._index.num_bytes.sum())
    print(f"\nan epoch of {len(index):,} samples, {total / MIB:.0f} MiB in tar files, from an object store")
    rows = []
    for num_ranks in range(1, 5):
        batches, read, requests = zip(*(epoch_of(folder, num_ranks, rank) for rank in range(num_ranks)), strict=True)
        together = [list(itertools.chain(*step)) for step in zip(*batches, strict=True)]
        digest = hashlib.sha256(json.dumps(together).encode()).hexdigest()[:12]
        rows.append({"ranks": num_ranks, "read": read, "requests": requests, "digest": digest, "of": total})
        each = ", ".join(f"{size / MIB:.1f}" for size in read)
        print(f"  {num_ranks} ranks: MiB {each}; together {sum(read) / total:.4f} of all bytes; digest {digest}")
    return rows


# --- throughput, resume and memory: these run in a process for each rank


def rank_and_batch() -> tuple[int, int, int]:
    """Return rank, number of ranks, and samples of a rank's batch."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    return int(os.environ["RANK"]), num_ranks, BATCH // num_ranks


def ours(kind: str) -> Start:
    """Return what loads as `fit` does."""

    def start(folder: Path, step: int, workers: int) -> Iterator[Any]:
        rank, num_ranks, _ = rank_and_batch()
        given = f"{folder}/mds" if kind == "mds" else f"{folder}/{kind}/*.{kind}"
        data = ShardedDataset(given, decode=decode, cache_dir=folder / "cache")
        order = data.make_order(BATCH, 0, drop_last=False)
        split = BatchSplit(num_ranks, range(rank, rank + 1), 1, None, order.num_lanes)
        options = LoadOptions(None, workers, pin_memory=False)
        return load(data, train_requests(order, split, step), options, seed=0, epochs=[data])

    return start


def hugging_face(folder: Path, step: int, workers: int) -> Iterator[Any]:
    """Load a stream of Parquet files that is divided by node."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    rank, num_ranks, size = rank_and_batch()
    stream = datasets.load_dataset(
        "parquet", data_files=f"{folder}/parquet/*.parquet", streaming=True, split="train", cache_dir=f"{folder}/hf"
    )
    stream = split_dataset_by_node(stream.shuffle(seed=0, buffer_size=1000), rank, num_ranks)
    # Each loader process skips so many.
    stream = stream.skip(step * size // max(workers, 1)).map(lambda row: dict(zip("xy", decode(row), strict=True)))
    return iter(torch.utils.data.DataLoader(stream, size, num_workers=workers))


def webdataset(folder: Path, step: int, workers: int) -> Iterator[Any]:
    """Load tar files that are divided by node."""
    import webdataset as wds

    _, _, size = rank_and_batch()
    paths = sorted(map(str, (folder / "tar").glob("*.tar")))
    data = wds.WebDataset(paths, shardshuffle=len(paths), seed=0, nodesplitter=wds.split_by_node)
    batches = data.shuffle(1000).map(decode).batched(size)
    return itertools.islice(iter(wds.WebLoader(batches, batch_size=None, num_workers=workers)), step, None)


def mosaic(folder: Path, step: int, workers: int) -> Iterator[Any]:
    """Load MDS."""
    from streaming import StreamingDataLoader, StreamingDataset

    class Decoded(StreamingDataset):
        def __getitem__(self, at: int) -> Any:
            return decode(super().__getitem__(at))

    _, _, size = rank_and_batch()
    data = Decoded(local=str(folder / "mds"), shuffle=True, batch_size=size)
    loader = StreamingDataLoader(data, batch_size=size, num_workers=workers)
    if step:
        loader.load_state_dict(data.state_dict(step * BATCH, False))
    return iter(loader)


CONTENDERS: dict[str, tuple[str, Start]] = {
    "ShardedDataset, tar": ("lockstep", ours("tar")),
    "WebDataset, tar": ("webdataset", webdataset),
    "ShardedDataset, MDS": ("streaming", ours("mds")),
    "MosaicML Streaming, MDS": ("streaming", mosaic),
    "ShardedDataset, Parquet": ("lockstep", ours("parquet")),
    "datasets, Parquet": ("datasets", hugging_face),
}
# Each peer, and ours of the same files.
PAIRS = list(zip(list(CONTENDERS)[::2], list(CONTENDERS)[1::2], strict=True))


def pss(process: psutil.Process) -> float:
    """Return MiB of a process, of which shared pages count in parts."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def run_rank(name: str, folder: Path, step: int, workers: int, num_batches: int) -> None:
    """Load batches as one rank, and print what it took."""
    warnings.simplefilter("ignore")
    for module in ("pyarrow.parquet", CONTENDERS[name][0]):
        import_module(module)
    begin = time.perf_counter()
    batches = CONTENDERS[name][1](folder, step, workers)
    next(batches)
    first, cpu = time.perf_counter(), time.process_time()
    size, seconds = 0, 0.0
    while num_batches and seconds < MAX_S:
        size, num_batches = size + len(batch_of(next(batches))), num_batches - 1
        seconds = time.perf_counter() - first
    rate, cpu_us = size / seconds, (time.process_time() - cpu) / size * 1e6
    me = psutil.Process()
    memory = sum(pss(each) for each in (me, *me.children(recursive=True)))
    print(json.dumps({"first_s": first - begin, "samples_s": rate, "cpu_us": cpu_us, "pss": memory}))
    sys.stdout.flush()
    sys.stdin.read()  # until all have measured
    os._exit(0)


def batch_of(loaded: Any) -> torch.Tensor:
    """Return the first tensor of what a loader returned."""
    batch = loaded.batches[0] if isinstance(loaded, MicroBatch) else loaded
    tensor: torch.Tensor = batch["x"] if isinstance(batch, dict) else batch[0]
    return tensor


def run_once(name: str, folder: Path, step: int, *, num_ranks: int, workers: int, num_batches: int) -> dict[str, float]:
    """Return seconds to the first batch of the slowest rank; samples a second, and MiB, of all."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    shared = {"WORLD_SIZE": f"{num_ranks}", "LOCAL_WORLD_SIZE": f"{num_ranks}", "MASTER_PORT": f"{port}"}
    ranks = []
    for rank in range(num_ranks):
        env = {**os.environ, **shared, "MASTER_ADDR": "127.0.0.1", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        words = [sys.executable, "-m", "bench.shards", "--rank", name, str(folder), str(step), f"{workers}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        ranks.append(subprocess.Popen([*words, f"{num_batches}"], env=env, text=True, **pipes))  # type: ignore[call-overload]
    found = []
    for process in ranks:
        line = ""
        while not line.startswith("{"):
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"a rank of {name} failed")
        found.append(json.loads(line))
    for process in ranks:
        process.communicate()
    together = {key: sum(each[key] for each in found) for key in ("samples_s", "cpu_us", "pss")}
    return {"first_s": max(each["first_s"] for each in found), **together}


def compare(
    folder: Path, rounds: int, step: int, figures: dict[str, str], **how: int
) -> dict[str, list[dict[str, float]]]:
    """Print and return a table: medians of ``figures``, and each peer's divided by ours in the same round."""
    present = [name for name, (module, _) in CONTENDERS.items() if find_spec(module)]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    for index in range(rounds):
        for name in order_of_round(present, index):
            rows[name].append(run_once(name, folder, step, **how))
    print(f"  {'':26}" + "".join(f"{title:>34}" for title in figures.values()))
    for pair in PAIRS:
        for name in pair:
            if name not in rows:
                print(f"  {name:26}  left out: {CONTENDERS[name][0]} is not installed")
                continue
            line = f"  {name:26}"
            for key in figures:
                values, of_ours = ([each[key] for each in rows[which]] for which in (name, pair[0]))
                ratio = paired_ratio(values, of_ours)
                compared = f" x{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" * (name != pair[0])
                median = Spread.of(values).median
                line += f"{median:{'11.2f' if median < 100 else '11,.0f'}}{compared:<23}"
            print(line.rstrip(), flush=True)
    return rows


def throughput(folder: Path, rounds: int, num_batches: int) -> dict[str, Any]:
    """Print and return the tables of one rank, by the number of its loader processes."""
    tables = {}
    for workers in (0, 1, 2):
        length = f"{num_batches} batches of {BATCH} or {MAX_S:g} s"
        print(f"\nan epoch from its begin: 1 rank x {workers} loader processes, {length}")
        figures = {"samples_s": "samples/s", "first_s": "first batch, s", "cpu_us": "CPU of the rank, us/sample"}
        how = {"num_ranks": 1, "workers": workers, "num_batches": num_batches}
        tables[f"{workers} workers"] = compare(folder, rounds, 0, figures, **how)
    return tables


def resume(folder: Path, rounds: int, step: int) -> dict[str, Any]:
    """Print and return the table of the resume."""
    print(f"\na resume at step {step} of local files, {NUM_RANKS} ranks x {WORKERS} loader processes")
    how = {"num_ranks": NUM_RANKS, "workers": WORKERS, "num_batches": NUM_BATCHES}
    return compare(folder, rounds, step, {"first_s": "first batch, s", "pss": "PSS, MiB"}, **how)


def main() -> None:
    """Write the files, measure, print the tables."""
    made = parser(__doc__, 5)
    made.add_argument("--rank", nargs=5, metavar=("NAME", "FOLDER", "STEP", "WORKERS", "BATCHES"), help="internal")
    args = made.parse_args()
    torch.set_num_threads(1)
    if args.rank:
        run_rank(args.rank[0], Path(args.rank[1]), *map(int, args.rank[2:]))
        return
    num_shards, samples_of_shard = (8, 300) if args.quick else (32, 1500)

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
            folder = Path(name)
            write(folder, num_shards, samples_of_shard)
            step = num_shards * samples_of_shard // BATCH // 4
            rounds, num_batches = (1, 20) if args.quick else (args.rounds, 200)
            found = {"reading": reading(folder), "throughput": throughput(folder, rounds, num_batches)}
            return {**found, "resume": resume(folder, rounds, step)}

    record(args.json, measure)


if __name__ == "__main__":
    main()
