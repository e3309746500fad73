"""Data sets in shards: formats, their order, and what is read of them."""

import contextlib
import fcntl
import io
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import lockstep
from lockstep.data import shards
from lockstep.data.loader import Fetch, LoadOptions, Request, load, train_requests
from lockstep.data.order import BatchSplit, ShardOrder, shard_sequence
from lockstep.errors import ConfigurationError, DataError
from lockstep.train.plan import check_split
from tests.shards import (
    SIZES,
    counting_store,
    number_of,
    ranges_read,
    standing_in_for_streaming,
    write_mds,
    write_parquet,
    write_shards,
    write_tar,
)

NUM_SAMPLES = sum(SIZES)


def order(sizes=SIZES, batch_size=8, *, seed=0, drop_last=False, window=5, num_lanes=6):
    return ShardOrder(np.array(sizes), batch_size, seed, drop_last, window, num_lanes)


def steps(made, epoch=0):
    first = epoch * made.steps_per_epoch
    return [made.batch(step).tolist() for step in range(first, first + made.steps_per_epoch)]


# --- the order


@pytest.mark.parametrize(
    ("sizes", "batch_size", "num_lanes"), [(SIZES, 8, 6), ([3, 4], 20, 12), ([40], 7, 7), (SIZES, 5, 1)]
)
@pytest.mark.parametrize("window", [1, 5, 1000])
def test_an_epoch_has_each_sample_once_in_full_batches_and_one_more(sizes, batch_size, num_lanes, window):
    made = order(sizes, batch_size, window=window, num_lanes=num_lanes)
    for epoch in range(2):
        batches = steps(made, epoch)
        assert sorted(itertools.chain(*batches)) == list(range(sum(sizes)))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (made.steps_per_epoch - 1)
    assert steps(made) == steps(order(sizes, batch_size, window=window, num_lanes=num_lanes))


def test_an_order_depends_on_epoch_and_seed():
    assert steps(order()) != [[*batch] for batch in steps(order(), epoch=1)]
    assert steps(order()) != steps(order(seed=1))


def test_an_incomplete_batch_can_be_dropped():
    assert NUM_SAMPLES == 41
    assert [len(batch) for batch in steps(order())] == [8] * 5 + [1]
    assert [len(batch) for batch in steps(order(drop_last=True))] == [8] * 5


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("proportions", [None, (3, 1, 1, 1, 1)])
def test_any_number_of_ranks_divides_the_same_batches_by_whole_lanes(accumulate, proportions):
    made = order(batch_size=13, num_lanes=10)
    lanes = [set() for _ in range(made.num_lanes)]
    for num_ranks in range(1, 6):
        shares = None if proportions is None else proportions[:num_ranks]
        read = [set() for _ in range(num_ranks)]
        for batch in steps(made):
            found = []
            for rank in range(num_ranks):
                split = BatchSplit(num_ranks, range(rank, rank + 1), accumulate, shares, made.num_lanes)
                micro = [part.get(rank, []) for part in split.micro_batches(torch.tensor(batch))]
                found += itertools.chain(*micro)
                read[rank] |= {*itertools.chain(*micro)}
            assert found == batch
        assert set.union(*read) == set(range(NUM_SAMPLES))
        assert sum(map(len, read)) == NUM_SAMPLES
        for rank in range(num_ranks):
            for lane in BatchSplit(num_ranks, range(rank, rank + 1), 1, shares, made.num_lanes).lanes(rank):
                lanes[lane].add(
                    frozenset(made.indices(0, np.arange(*made.lane_starts[lane : lane + 2])).tolist()) <= read[rank]
                )
    assert lanes == [{True}] * made.num_lanes


def test_a_lane_is_read_from_begin_to_end_a_window_at_a_time():
    made = order([50, 70, 80], batch_size=20, window=6, num_lanes=4)
    split = BatchSplit(4, range(4), 1, None, 4)
    for lane in range(4):
        expected = made.indices(0, np.arange(*made.lane_starts[lane : lane + 2])).tolist()
        own = split.positions(20, lane)
        found = list(itertools.chain(*(batch[own.start : own.stop] for batch in steps(made))))
        assert found != expected
        for start in range(0, 50, 6):
            assert sorted(found[start : start + 6]) == sorted(expected[start : start + 6])


def test_parts_of_several_lanes_are_in_proportion():
    split = BatchSplit(8, range(8), 1, None, 48)
    assert [len(split.positions(256, share)) for share in range(8)] == [32] * 8
    assert [len(split.positions(3, share)) for share in range(8)] == [1, 0, 1, 0, 0, 1, 0, 0]


def test_a_long_order_is_random_access():
    made = order([10_000] * 10_000, 256, window=512, num_lanes=48)
    made.batch(0)
    start = time.process_time()
    batches = torch.cat([made.batch(step) for step in range(300_000, 300_010)])
    assert time.process_time() - start < 2
    assert len(batches.unique()) == 2560


def test_more_ranks_than_lanes_are_refused():
    with pytest.raises(ConfigurationError) as error:
        check_split(24, BatchSplit(5, range(5), 1, num_lanes=3))
    assert str(error.value) == (
        "The 3 lanes of the ShardedDataset leave 2 of 5 shares of a global batch of 24 without one.\n"
        "Give it more lanes, of which there are at most as many as samples of a global batch, or train on fewer "
        "devices."
    )
    with pytest.raises(ConfigurationError) as error:
        check_split(5, BatchSplit(2, range(2), 3, num_lanes=5))
    assert "Set the global batch size to 8 or more" in str(error.value)  # 2 of 5 lanes have 3 of 8 samples
    check_split(8, BatchSplit(2, range(2), 3, num_lanes=5))


# --- the formats


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_samples_are_in_the_order_of_the_files(tmp_path, kind):
    data = lockstep.ShardedDataset(write_shards(tmp_path / "data", kind), cache_dir=tmp_path / "cache")
    assert len(data) == NUM_SAMPLES
    assert [number_of(data[index]) for index in range(NUM_SAMPLES)] == list(range(NUM_SAMPLES))
    assert number_of(data[-1]) == NUM_SAMPLES - 1
    with pytest.raises(IndexError) as error:
        data[NUM_SAMPLES]
    assert str(error.value) == "sample 41 of 41"
    again = pickle.loads(pickle.dumps(data))
    assert number_of(again[20]) == 20


def test_a_sample_of_a_tar_file_has_the_key_and_a_file_for_each_extension(tmp_path):
    write_tar(tmp_path / "0.tar", [5, 6])
    data = lockstep.ShardedDataset(tmp_path / "0.tar", cache_dir=tmp_path / "cache")
    assert data[1] == {"__key__": "part.1/000006", "txt": b"6", "bin": bytes([6]) * 940}


def add(tar, name, content=b"", **header):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in header.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_tar_file_is_read_as_by_webdataset(tmp_path, tar_format):
    long = f"{'d' * 90}/{'n' * 60}"
    with tarfile.open(tmp_path / "0.tar", "w", format=tar_format) as tar:
        add(tar, "part", type=tarfile.DIRTYPE)
        add(tar, "part/0.txt", b"0")
        add(tar, "part/0.link", type=tarfile.SYMTYPE, linkname="0.txt")
        add(tar, "part/0.hard", type=tarfile.LNKTYPE, linkname="part/0.txt")
        add(tar, "part/only.link", type=tarfile.SYMTYPE, linkname="0.txt")
        add(tar, "nokey", b"x" * 600)
        add(tar, f"{long}.Seg.PNG", b"1" * 512)
        add(tar, f"{long}.txt", b"2")
        add(tar, "after.txt", b"3")
        add(tar, "\u00e9.txt", b"", pax_headers={"comment": "a"})
        add(tar, "end", type=tarfile.DIRTYPE)
    data = lockstep.ShardedDataset(tmp_path / "0.tar", cache_dir=tmp_path / "cache")
    assert [*data] == [
        {"__key__": "part/0", "txt": b"0"},
        {"__key__": long, "seg.png": b"1" * 512, "txt": b"2"},
        {"__key__": "after", "txt": b"3"},
        {"__key__": "\u00e9", "txt": b""},
    ]


def test_a_header_of_a_tar_file_that_is_damaged_later_is_an_error(tmp_path):
    write_tar(tmp_path / "0.tar", [5, 6])
    data = lockstep.ShardedDataset(tmp_path / "0.tar", cache_dir=tmp_path / "cache")
    content = bytearray((tmp_path / "0.tar").read_bytes())
    content[1024 + 3] ^= 1  # a letter of the name of the second file
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(DataError, match="at byte 0, for sample 0: at byte 1024 there is neither a file nor the end"):
        data[0]
    assert data[1]["txt"] == b"6"


def test_a_row_has_the_columns_asked_for_and_is_decoded(tmp_path):
    write_parquet(tmp_path / "0.parquet", [5, 6])
    path, cache = tmp_path / "0.parquet", tmp_path / "cache"
    assert lockstep.ShardedDataset(path, cache_dir=cache)[1] == {"number": 6, "other": "6"}
    assert lockstep.ShardedDataset(path, cache_dir=cache, columns=["other"])[1] == {"other": "6"}
    assert lockstep.ShardedDataset(path, cache_dir=cache, decode=lambda row: row["number"] + 1)[1] == 7


def test_files_that_are_written_again_are_read_again(tmp_path):
    for numbers in ([5, 6], list(range(20)), [1]):
        write_parquet(tmp_path / "0.parquet", numbers)
        data = lockstep.ShardedDataset(tmp_path / "0.parquet", cache_dir=tmp_path / "cache", decode=number_of)
        assert [data[index] for index in range(len(data))] == numbers


def test_an_error_of_decode_names_shard_and_sample(tmp_path):
    write_parquet(tmp_path / "0.parquet", [5, 6])
    path = tmp_path / "0.parquet"
    data = lockstep.ShardedDataset(path, cache_dir=tmp_path / "cache", decode=lambda row: row["nothere"])
    with pytest.raises(KeyError) as error:
        data[1]
    assert error.value.__notes__ == [f"decode raised it for sample 1, {path} at row 1."]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_works_in_a_plain_loader(tmp_path, kind, workers):
    pattern = write_shards(tmp_path / "data", kind)
    data = lockstep.ShardedDataset(pattern, decode=number_of, cache_dir=tmp_path / "cache")
    loader = DataLoader(
        data, batch_size=6, shuffle=True, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(NUM_SAMPLES))


def test_the_index_is_made_once(tmp_path, monkeypatch):
    pattern = write_shards(tmp_path / "data", "tar")
    lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_index_tar", None)
        assert len(lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache")) == NUM_SAMPLES
    write_tar(tmp_path / "data/0.tar", [0])
    assert len(lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache")) == NUM_SAMPLES - 6
    assert len(list((tmp_path / "cache").glob("*"))) == 3  # two indices, and the pieces


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_folder_of_mds_is_read(tmp_path, monkeypatch, is_remote):
    standing_in_for_streaming(monkeypatch)
    url = write_mds(tmp_path / "data")
    url = counting_store(url, tmp_path / "log") if is_remote else url
    data = lockstep.ShardedDataset(url, cache_dir=tmp_path / "cache")
    assert [number_of(data[index]) for index in range(NUM_SAMPLES)] == list(range(NUM_SAMPLES))
    assert data[3] == {"number": 3, "x": bytes([3]) * 903}
    assert number_of(pickle.loads(pickle.dumps(data))[30]) == 30


def test_mds_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "streaming", None)
        for name in ("streaming.base", "streaming.base.format", "streaming.base.format.mds"):
            patch.delitem(sys.modules, name, raising=False)
        with pytest.raises(ConfigurationError) as error:
            lockstep.ShardedDataset(write_mds(tmp_path / "0"), cache_dir=cache)
    assert str(error.value) == (
        "The shards cannot be read without mosaicml-streaming: No module named 'streaming.base'; "
        "'streaming' is not a package.\n"
        "Install it on all machines: pip install mosaicml-streaming."
    )
    standing_in_for_streaming(monkeypatch)
    with pytest.raises(ConfigurationError) as error:
        lockstep.ShardedDataset(write_mds(tmp_path / "1", compression="zstd"), cache_dir=cache)
    assert str(error.value) == (
        f"{tmp_path}/1/index.json lists shards that are compressed, of different columns, or not MDS.\n"
        "Write them with MDSWriter without compression."
    )
    with pytest.raises(ConfigurationError) as error:
        lockstep.ShardedDataset(write_mds(tmp_path / "2", column_encodings=["int", "pkl"]), cache_dir=cache)
    assert str(error.value).startswith(f"{tmp_path}/2/index.json: Column x contains an unsafe type: pkl.")


# --- what cannot be read


def test_what_is_given_must_be_shards(tmp_path):
    (tmp_path / "0.csv").write_text("1,2")
    write_tar(tmp_path / "0.tar", [])
    write_tar(tmp_path / "1.tar", [1])
    cache = tmp_path / "cache"
    kinds = "Give .parquet files, uncompressed .tar files, or folders of MDS; all of the same kind."
    one_store = "The shards are in no or several object stores.\nGive the shards of one store."
    missing = f"No file matches {tmp_path}/*.parquet.\nCheck the name, and that this machine sees the folder."
    twice = f"{tmp_path}/1.tar is given twice, so its samples would count twice.\nGive each file once."
    empty = f"There are no samples in {tmp_path}/0.tar, or in others.\nGive shards with samples."
    cases = [
        (tmp_path / "*.parquet", DataError, missing),
        (tmp_path / "0.csv", ConfigurationError, f"Shards that end in '.csv' cannot be read.\n{kinds}"),
        (tmp_path / "*.*", ConfigurationError, f"Shards that end in '.csv' and '.tar' cannot be read.\n{kinds}"),
        ([], ConfigurationError, one_store),
        ([tmp_path / "1.tar", "memory://1.tar"], ConfigurationError, one_store),
        ([tmp_path / "1.tar", tmp_path / "*.tar"], ConfigurationError, twice),
        (tmp_path / "0.tar", ConfigurationError, empty),
    ]
    for given, kind, text in cases:
        with pytest.raises(kind) as error:
            lockstep.ShardedDataset(given, cache_dir=cache)
        assert str(error.value) == text
    with pytest.raises(ConfigurationError) as error:
        lockstep.ShardedDataset(tmp_path / "1.tar", cache_dir=cache, window=0)
    assert str(error.value) == "window=0 is too small.\nGive at least 1."
    with pytest.raises(ConfigurationError) as error:
        lockstep.ShardedDataset("nostore://bucket/1.tar", cache_dir=cache)
    assert str(error.value).startswith("nostore://bucket/1.tar is in an object store that cannot be used here: ")


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("tar", "at byte 20480 there is neither a file nor the end of the archive"),
        ("parquet", "Parquet magic bytes not found"),
    ],
)
def test_a_shard_that_is_cut_short_is_named(tmp_path, kind, cause):
    pattern = write_shards(tmp_path / "data", kind)
    path = tmp_path / f"data/3.{kind}"
    os.truncate(path, path.stat().st_size // 2 + 100)
    with pytest.raises(DataError) as error:
        lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache")
    assert str(error.value).startswith(f"{path} cannot be read: {cause}")
    assert error.value.file == str(path)


def test_a_shard_that_is_cut_short_later_is_named_with_the_place(tmp_path):
    data = lockstep.ShardedDataset(write_shards(tmp_path / "data", "tar"), cache_dir=tmp_path / "cache")
    path = tmp_path / "data/4.tar"
    os.truncate(path, 3000)
    with pytest.raises(DataError) as error:
        data[40]
    (offset,) = {error.value.offset}
    assert str(error.value) == (
        f"{path} cannot be read at byte {offset}, for sample 40: it ends at byte {offset}.\n"
        "It is damaged, was changed after the data set was created, or is out of reach. Restore it."
    )
    assert (error.value.file, error.value.sample) == (str(path), 40)
    write_tar(path, range(100, 140))
    with pytest.raises(DataError) as error:
        data[40]
    assert str(error.value).startswith(f"{path} cannot be read at byte {offset}, for sample 40: ")
    path.unlink()
    with pytest.raises(DataError) as error:
        data[40]
    assert f"{path} cannot be read at byte {offset}, for sample 40: [Errno 2] No such file" in str(error.value)


# --- what is read


def loaded(data, made, *, num_ranks=1, rank=0, first_step=0, num_steps=None, workers=0):
    """Return the batches of a rank as `fit` loads them, without what it would load ahead of the last."""
    split = BatchSplit(num_ranks, range(rank, rank + 1), 1, None, made.num_lanes)
    requests = itertools.islice(train_requests(made, split, first_step), num_steps or made.steps_per_epoch)
    micros = load(data, requests, LoadOptions(None, workers, pin_memory=False), seed=0, epochs=[data])
    return [micro.batches[0].tolist() if micro.batches else [] for micro in micros]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_goes_on_at_once(tmp_path, kind, workers):
    pattern = write_shards(tmp_path / "data", kind)
    data = lockstep.ShardedDataset(pattern, decode=number_of, window=5, cache_dir=tmp_path / "cache")
    made = data.make_order(8, 0, drop_last=False)
    whole = loaded(data, made, num_steps=12)
    assert sorted(itertools.chain(*whole[:6])) == list(range(NUM_SAMPLES))
    assert loaded(data, made, first_step=9, num_steps=3, workers=workers) == whole[9:]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_samples_of_a_batch_are_those_read_one_by_one(tmp_path, kind, is_remote, is_ordered):
    write_shards(tmp_path / "data", kind)
    url = counting_store(tmp_path / "data", tmp_path / "log") if is_remote else tmp_path / "data"
    data = lockstep.ShardedDataset(f"{url}/*.{kind}", decode=number_of, window=3, cache_dir=tmp_path / "cache")
    if is_ordered:
        data.make_order(8, 0, drop_last=False)
    for epoch in range(2):
        data.set_epoch(epoch)
        indices = np.random.default_rng(epoch).integers(NUM_SAMPLES, size=60).tolist()
        assert list(data.each(indices)) == [data[index] for index in indices] == indices
    _join_threads()


def test_a_sample_that_cannot_be_read_is_named_and_the_others_of_its_batch_are_read(tmp_path):
    data = lockstep.ShardedDataset(write_shards(tmp_path / "data", "tar"), decode=number_of, cache_dir=tmp_path / "c")
    path = tmp_path / "data/4.tar"
    content = bytearray(path.read_bytes())
    content[int(data._index.bounds[-3]) + 3] ^= 1  # a letter of the name of a file of the last sample but one
    path.write_bytes(content)
    request = Request(epoch=2, step=7, num_global=4, shares={0: [5, NUM_SAMPLES - 2, NUM_SAMPLES - 1, 0]})
    micro = Fetch(data, LoadOptions(None, 0, pin_memory=False, skip_bad=True), 0, [data])[request]
    assert micro.batches[0].tolist() == micro.samples[0].tolist() == [5, NUM_SAMPLES - 1, 0]
    (bad,) = micro.bad
    assert (bad.sample, bad.epoch, bad.step, bad.file) == (NUM_SAMPLES - 2, 2, 7, str(path))
    assert f"for sample {NUM_SAMPLES - 2}: " in bad.cause


def test_a_subclass_may_have_other_indexing(tmp_path):
    class Doubled(lockstep.ShardedDataset):
        def __getitem__(self, index):
            return 2 * super().__getitem__(index)

    data = Doubled(write_shards(tmp_path / "data", "parquet"), decode=number_of, cache_dir=tmp_path / "cache")
    made = data.make_order(8, 0, drop_last=False)
    assert loaded(data, made) == [[2 * number for number in batch] for batch in steps(order(num_lanes=8, window=512))]


def test_decode_draws_the_same_numbers_in_any_batch_and_process(tmp_path):
    def draw(sample):
        return float(torch.rand(()) + np.random.rand() + random.random()) + 10 * number_of(sample)

    pattern = write_shards(tmp_path / "data", "parquet")
    data = lockstep.ShardedDataset(pattern, decode=draw, cache_dir=tmp_path / "cache")
    made = data.make_order(8, 0, drop_last=False)
    found = loaded(data, made, workers=2)
    assert found == loaded(data, made)
    single = Fetch(data, LoadOptions(None, 0, pin_memory=False), 0, [data])
    for index, value in zip(steps(made)[2], found[2], strict=True):
        assert single[Request(0, 2, 1, {0: [index]})].batches[0].tolist() == [value]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_byte_of_an_object_store_is_read_once_by_one_rank(tmp_path, monkeypatch, workers, num_ranks):
    monkeypatch.setattr(shards, "_PIECE_BYTES", 5000)
    # The next epoch, which is fetched ahead, is read in the order of this one: it has the same pieces.
    for module in (shards, lockstep.data.order):
        monkeypatch.setattr(module, "shard_sequence", lambda made, _epoch: shard_sequence(made, 0))
    log = tmp_path / "log"
    write_shards(tmp_path / "data", "tar")
    url = f"{counting_store(tmp_path / 'data', log)}/*.tar"
    data = lockstep.ShardedDataset(url, decode=number_of, window=5, lanes=6, cache_dir=tmp_path / "cache")
    made = data.make_order(8, 0, drop_last=False)
    found = []
    for rank in range(num_ranks):
        monkeypatch.setenv("RANK", str(rank))
        found.append(loaded(data, made, num_ranks=num_ranks, rank=rank, workers=workers))
    expected = [list(itertools.chain(*ranks)) for ranks in zip(*found, strict=True)]
    assert expected == steps(order())
    read = ranges_read(log)
    for number in range(len(SIZES)):
        ranges = sorted((start, end) for name, start, end, _ in read if name == f"{number}.tar")
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges)), "each byte once"
        size = os.path.getsize(tmp_path / f"data/{number}.tar")
        assert ranges[-1][1] > size - 11_000 if ranges else number == 2, "all but the end of the file"
    assert {rank for *_, rank in read} == set(range(num_ranks))


def test_a_local_tar_file_is_read_a_sample_at_a_time(tmp_path, monkeypatch):
    pattern = write_shards(tmp_path / "data", "tar")
    data = lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache", window=5)
    data.make_order(8, 0, drop_last=False)
    sizes, read = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: sizes.append(args[1]) or read(*args))
    for index in range(NUM_SAMPLES):
        assert number_of(data[index]) == index
    assert sizes == [512 * (3 + (700 + 40 * number + 511) // 512) for number in range(NUM_SAMPLES)]
    assert list((tmp_path / "cache/pieces").iterdir()) == []


def test_a_row_group_is_decoded_once_for_all_processes(tmp_path, monkeypatch):
    pattern = write_shards(tmp_path / "data", "parquet")
    fetched = tmp_path / "fetched"
    fetch = shards._Parquet.fetch

    def counted(self, place, target):
        with fetched.open("a") as file:
            file.write(f"{place.name}\n")
        fetch(self, place, target)

    monkeypatch.setattr(shards._Parquet, "fetch", counted)
    data = lockstep.ShardedDataset(pattern, decode=number_of, window=5, cache_dir=tmp_path / "cache")
    assert loaded(data, data.make_order(8, 0, drop_last=False), workers=2) == steps(order(num_lanes=8))
    names = fetched.read_text().split()
    assert len(names) == len({*names}) == 2 + 3 + 3 + 4


def test_rows_of_any_type_are_read_in_batches(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(shards, "_BATCH_BYTES", 40)
    rows = [
        {"list": [number] * (number % 5), "kind": f"k{number % 3}", "none": None if number % 2 else {"x": 0.5 * number}}
        for number in range(50)
    ]
    table = pyarrow.Table.from_pylist(rows)
    table = table.set_column(1, "kind", table["kind"].dictionary_encode())
    parquet.write_table(table, tmp_path / "0.parquet", row_group_size=20)
    data = lockstep.ShardedDataset(tmp_path / "0.parquet", cache_dir=tmp_path / "cache")
    assert [*data] == rows
    (piece,) = (tmp_path / "cache/pieces").glob("*-0-20")
    assert 1 < shards._open_row_group(str(piece))[1] < 20


def test_row_groups_that_were_removed_are_closed_with_their_window(tmp_path):
    write_parquet(tmp_path / "0.parquet", list(range(40)))
    data = lockstep.ShardedDataset(tmp_path / "0.parquet", window=5, lanes=1, cache_dir=tmp_path / "cache")
    made = data.make_order(6, 0, drop_last=False)
    data[0]
    (piece,) = (tmp_path / "cache/pieces").glob("*-0-4")
    shards._open_row_group(str(piece))
    piece.unlink()
    opened = f"{piece} (deleted)"
    assert opened in open_files()
    data[int(made.indices(0, np.array([20]))[0])]
    assert opened not in open_files()
    _join_threads()


def test_a_piece_is_marked_as_used_once_in_a_window(tmp_path, monkeypatch):
    write_parquet(tmp_path / "0.parquet", list(range(40)))
    data = lockstep.ShardedDataset(tmp_path / "0.parquet", window=8, lanes=1, cache_dir=tmp_path / "cache")
    first = data.make_order(8, 0, drop_last=False).indices(0, np.arange(16)).tolist()
    list(data.each(first))
    _join_threads()
    marked = []
    monkeypatch.setattr(os, "utime", marked.append)
    list(data.each(first[8:]))
    assert marked == []
    list(data.each(first))  # the first window again, and the second
    names = [f"{data._cache._folder}/{data._version}-0-{start}-{start + 4}" for start in range(0, 16, 4)]
    assert marked == names
    _join_threads()


def open_files():
    found = []
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link.path))
    return found


def test_what_follows_is_fetched_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE_BYTES", 1000)  # less than a sample
    write_shards(tmp_path / "data", "tar", [60])
    url = f"{counting_store(tmp_path / 'data', tmp_path / 'log')}/*.tar"
    data = lockstep.ShardedDataset(url, window=5, lanes=2, cache_dir=tmp_path / "cache")
    made = data.make_order(6, 0, drop_last=False)
    assert number_of(data[int(made.batch(0)[0])]) < 5
    _join_threads()
    assert sorted(start for _, start, _, _ in ranges_read(tmp_path / "log")) == data._index.bounds[:10].tolist()
    assert number_of(data[32]) == 32  # of the first window of the other lane
    _join_threads()
    assert len(ranges_read(tmp_path / "log")) == 20


def test_what_follows_the_end_of_an_epoch_is_fetched_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE_BYTES", 1000)  # less than a sample
    write_shards(tmp_path / "data", "tar", [31, 31])
    url = f"{counting_store(tmp_path / 'data', tmp_path / 'log')}/*.tar"
    data = lockstep.ShardedDataset(url, window=5, lanes=2, cache_dir=tmp_path / "cache")
    made = data.make_order(6, 0, drop_last=False)
    assert shard_sequence(made, 0)[0].tolist() != shard_sequence(made, 1)[0].tolist()

    def fetched():
        _join_threads()
        read = ranges_read(tmp_path / "log")
        starts = {"0.tar": data._index.bounds[:31].tolist(), "1.tar": data._index.bounds[32:63].tolist()}
        return sorted(31 * int(name[0]) + starts[name].index(start) for name, start, _, _ in read)

    first, last = made.indices(1, np.arange(5)).tolist(), made.indices(0, np.arange(25, 31)).tolist()
    assert number_of(data[last[0]]) == last[0]
    assert fetched() == sorted(last)  # its window and the last, of one sample
    data[last[5]]
    assert fetched() == sorted(first + last)
    data.set_epoch(1)
    data[first[3]]
    assert fetched() == sorted(first + last + made.indices(1, np.arange(5, 10)).tolist())


def _join_threads():
    for thread in threading.enumerate():  # other tests may have left some
        if thread.name == shards._AHEAD:
            thread.join(100)


def test_the_cache_keeps_what_was_used_last_within_its_size(tmp_path):
    cache = shards._PieceCache(tmp_path, 2500)
    fetched = []

    def use(name):
        def fetch(path):
            fetched.append(name)
            path.write_bytes(name.encode() * 1000)

        shards._touch.cache_clear()
        return cache.read(name, fetch, lambda path: Path(path).read_bytes()[:1].decode())

    assert [use(name) for name in "ababcacb"] == [*"ababcacb"]
    assert fetched == ["a", "b", "c", "a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]

    def fetch_slowly(path):
        path.write_bytes(b"d" * 100)
        assert use("a") == "a"  # which removes others, but not what is being fetched
        assert path.exists()

    assert cache.read("d", fetch_slowly, os.path.getsize) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "d"]


def test_a_piece_that_cannot_be_fetched_leaves_nothing(tmp_path):
    cache = shards._PieceCache(tmp_path, 2500)

    def fail(path):
        path.write_bytes(b"half")
        raise OSError("no route")

    with pytest.raises(OSError) as error:
        cache.read("a", fail, os.path.getsize)
    assert str(error.value) == "no route"
    assert list(tmp_path.iterdir()) == []
    # A process that was killed leaves its part.
    (tmp_path / "a.part").write_bytes(b"half of it")
    assert cache.read("a", lambda path: path.write_bytes(b"1"), os.path.getsize) == 1


def test_what_a_killed_process_was_fetching_is_removed_by_others(tmp_path):
    cache = shards._PieceCache(tmp_path, 2500)

    def fetch(path):
        if (child := os.fork()) == 0:
            cache.fetch("killed", lambda part: part.write_bytes(b"half") and os.kill(os.getpid(), signal.SIGKILL))
        os.waitpid(child, 0)
        path.write_bytes(b"1")
        cache.fetch("b", lambda part: part.write_bytes(b"2"))  # does not even lock what may be fetched right now
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.part", "b", "killed.part"]
        for part in tmp_path.glob("*.part"):
            os.utime(part, (time.time() - 100,) * 2)
        cache.fetch("c", lambda part: part.write_bytes(b"3"))

    cache.fetch("a", fetch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("fails", [False, True])
def test_one_process_of_a_machine_makes_the_index(tmp_path, monkeypatch, fails):
    pattern, log = write_shards(tmp_path / "data", "tar"), tmp_path / "log"
    plain = shards._index_tar

    def index(store, path):
        with log.open("a") as file:
            file.write(f"{path}\n")
        time.sleep(0.1)
        if fails:
            raise OSError("no route")
        return plain(store, path)

    def rank():
        try:
            return len(lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache"))
        except DataError as error:
            return str(error).splitlines()[0]

    monkeypatch.setattr(shards, "_index_tar", index)
    found = in_processes(3, rank)
    assert found == [f"{tmp_path}/data/0.tar cannot be read: no route." if fails else NUM_SAMPLES] * 3
    if not fails:
        assert sorted(log.read_text().split()) == [f"{tmp_path}/data/{number}.tar" for number in range(len(SIZES))]
    assert len(list((tmp_path / "cache").glob("index-*"))) == (not fails)


def in_processes(count, function):
    """Return what ``function`` returns in each of several processes at once."""
    context = multiprocessing.get_context("fork")
    results, together = context.SimpleQueue(), context.Barrier(count)

    def run():
        together.wait(60)
        results.put(function())

    processes = [context.Process(target=run) for _ in range(count)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join(60)
    return found


def test_a_damaged_index_is_made_again(tmp_path):
    pattern = write_shards(tmp_path / "data", "tar")
    lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("index-*")
    for size in (0, path.stat().st_size // 2):
        os.truncate(path, size)
        assert len(lockstep.ShardedDataset(pattern, cache_dir=tmp_path / "cache")) == NUM_SAMPLES


def test_a_piece_is_fetched_once_by_threads_that_need_it_at_once(tmp_path):
    cache, fetched, found = shards._PieceCache(tmp_path, 2500), [], []

    def fetch(path):
        fetched.append(path)
        time.sleep(0.2)
        path.write_bytes(b"1")

    def use():
        found.append(cache.read("a", fetch, os.path.getsize))

    threads = [threading.Thread(target=use) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    cache.fetch("a", fetch, waits=False)
    for thread in threads:
        thread.join()
    assert (found, len(fetched)) == ([1] * 5, 1)


def test_a_cache_that_is_too_small_for_the_windows_is_refused(tmp_path):
    write_shards(tmp_path / "data", "tar")
    url = f"{counting_store(tmp_path / 'data', tmp_path / 'log')}/*.tar"
    data = lockstep.ShardedDataset(url, window=5, lanes=6, cache_dir=tmp_path / "cache", cache_bytes=50_000)
    with pytest.raises(ConfigurationError) as error:
        data.make_order(8, 0, drop_last=False)
    needed = sum(512 * (3 + (700 + 40 * number + 511) // 512) for number in range(NUM_SAMPLES)) * 5 * 6 // NUM_SAMPLES
    assert str(error.value) == (
        f"cache_bytes=50000 is too small: 6 windows of 5 samples have about {needed} bytes.\n"
        "Increase cache_bytes, or decrease window or lanes."
    )
    data = lockstep.ShardedDataset(url, window=1, lanes=6, cache_dir=tmp_path / "cache", cache_bytes=50_000)
    data.make_order(8, 0, drop_last=False)
    write_shards(tmp_path / "rows", "parquet")
    with pytest.raises(ConfigurationError) as error:
        path = f"{tmp_path}/rows/*.parquet"
        lockstep.ShardedDataset(path, window=1, cache_dir=tmp_path, cache_bytes=9).make_order(8, 0, drop_last=False)
    assert str(error.value).startswith("cache_bytes=9 is too small: 8 windows of 1 samples have about ")


def test_a_default_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    pattern = write_shards(tmp_path / "data", "tar")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uid = os.getuid()
    lockstep.ShardedDataset(pattern)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    (tmp_path / f"lockstep-shards-{uid}").rename(tmp_path / f"lockstep-shards-{uid + 1}")
    with pytest.raises(ConfigurationError, match=r"belongs to another user.\nName another folder as cache_dir."):
        lockstep.ShardedDataset(pattern)


def test_a_cache_that_was_named_may_belong_to_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert len(lockstep.ShardedDataset(write_shards(tmp_path / "data", "tar"), cache_dir=tmp_path)) == NUM_SAMPLES


def test_a_process_that_was_forked_during_a_fetch_does_not_keep_the_lock(tmp_path, monkeypatch):
    plain, inherited = os.open, []

    def opened(*args):
        file = plain(*args)
        inherited.append(os.dup(file))  # as a fork does
        return file

    monkeypatch.setattr(os, "open", opened)
    shards._PieceCache(tmp_path, 100).fetch("piece", lambda part: part.write_bytes(b"1"))
    monkeypatch.undo()
    with (tmp_path / "piece").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(inherited[0])
