"""Token files: every window once, whatever the number of files, and errors that name file, byte and sample."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lockstep.data import TokenFiles
from lockstep.errors import ConfigurationError, DataError


def write(path, tokens, dtype="uint16", header=b""):
    path.write_bytes(header + np.asarray(tokens, dtype).tobytes())
    return path


def inputs(data):
    return [x.tolist() for x, _ in data]


def test_windows_cover_each_token_once_and_targets_are_one_later(tmp_path):
    data = TokenFiles(write(tmp_path / "a.bin", range(14)), length=4)
    assert inputs(data) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [y.tolist() for _, y in data] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert data[0][0].dtype == data[0][1].dtype == torch.int64
    assert (len(data), data.num_tokens, data.num_unused_tokens) == (3, 14, 1)


@pytest.mark.parametrize("target", [True, False])
def test_a_batch_is_what_its_windows_are_collated(tmp_path, target):
    np.save(tmp_path / "b.npy", np.arange(500, 560, dtype=np.int32))
    data = TokenFiles([write(tmp_path / "a.bin", range(60)), tmp_path / "b.npy"], length=4, stride=3, target=target)
    indices = [len(data) - 1, 0, 7, 20, 0]
    ours, expected = data.read_batch(indices), default_collate([data[index] for index in indices])
    assert type(ours) is type(expected)
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.is_contiguous()) == (torch.int64, True)
    with pytest.raises(IndexError, match=f"window {len(data)} of {len(data)}"):
        data.read_batch([0, len(data)])


def test_a_window_may_end_with_its_file(tmp_path):
    assert len(TokenFiles(write(tmp_path / "a.bin", range(9)), length=4)) == 2
    assert len(TokenFiles(write(tmp_path / "b.bin", range(8)), length=4)) == 1
    assert len(TokenFiles(tmp_path / "b.bin", length=4, target=False)) == 2


def test_windows_can_overlap_or_leave_gaps_and_never_cross_files(tmp_path):
    write(tmp_path / "t-0.bin", range(7))
    write(tmp_path / "t-1.bin", [100])
    write(tmp_path / "t-2.bin", range(200, 206))
    data = TokenFiles([tmp_path / f"t-{number}.bin" for number in range(3)], length=3, stride=2, target=False)
    assert [x.tolist() for x in data] == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [200, 201, 202], [202, 203, 204]]
    assert (data.num_tokens, data.num_unused_tokens) == (14, 2)
    data = TokenFiles(tmp_path / "t-*.bin", length=1, stride=5)
    assert inputs(data) == [[0], [5], [200]]
    assert data[-1][0].tolist() == data[2][0].tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "int64", ">u2"])
def test_any_type_of_whole_numbers(tmp_path, dtype):
    data = TokenFiles(write(tmp_path / "a.bin", [1, 2, 3, 120], dtype), length=3, dtype=dtype)
    assert inputs(data) == [[1, 2, 3]]
    assert data[0][1].tolist() == [2, 3, 120]


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_files_say_themselves_what_they_hold(tmp_path, version):
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(70_000, 70_009, dtype=np.uint32), version)
    data = TokenFiles([tmp_path / "a.npy", write(tmp_path / "b.bin", range(5))], length=4)
    assert inputs(data) == [[70_000, 70_001, 70_002, 70_003], [70_004, 70_005, 70_006, 70_007], [0, 1, 2, 3]]


def test_a_header_is_skipped(tmp_path):
    data = TokenFiles(write(tmp_path / "a.bin", range(5), header=b"x" * 1024), length=4, header_bytes=1024)
    assert inputs(data) == [[0, 1, 2, 3]]


def test_loader_processes_read_the_same(tmp_path):
    data = TokenFiles(write(tmp_path / "a.bin", range(41)), length=4)
    expected = inputs(data)  # the file is open by now, in this process
    assert [x.tolist() for x, _ in DataLoader(data, batch_size=None, num_workers=2)] == expected
    assert inputs(pickle.loads(pickle.dumps(data))) == expected  # as where they are spawned


def test_many_files_need_few_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.data.tokens._MAX_OPEN", 3)
    for number in range(9):
        write(tmp_path / f"{number}.bin", [number, number])
    data = TokenFiles(tmp_path / "*.bin", length=1)
    assert inputs(data) == inputs(data) == [[number] for number in range(9)]
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert sum(link.startswith(str(tmp_path)) for link in links) == 3
    assert inputs(pickle.loads(pickle.dumps(data))) == inputs(data)


def test_what_cannot_be_right_is_found_at_once(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(1001))
    advice = "The file is truncated or has another dtype: restore it, or pass the dtype that it was written with."
    np.save(tmp_path / "floats.npy", np.zeros(5))
    np.save(tmp_path / "table.npy", np.zeros((5, 2), np.uint16))
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.zeros(100, np.uint16))
    os.truncate(tmp_path / "short.npy", 300)
    (tmp_path / "text.npy").write_text("no numbers at all")
    one_dimension = "Save integers in one dimension."
    check = "Check name and permissions, and that this machine sees the file."
    for file, text in {
        path: f"{path} has 1001 bytes, which is not a whole number of uint16 tokens.\n{advice}",
        tmp_path / "no.bin": f"{tmp_path}/no.bin cannot be read: No such file or directory.\n{check}",
        tmp_path / "n*.bin": f"No file matches {tmp_path}/n*.bin.\n"
        "Check the name, and that this machine sees the folder.",
        tmp_path: f"{tmp_path} cannot be read: Is a directory.\n{check}",
        tmp_path / "floats.npy": f"{tmp_path}/floats.npy holds an array of float64 in 1 dimensions.\n{one_dimension}",
        tmp_path / "table.npy": f"{tmp_path}/table.npy holds an array of uint16 in 2 dimensions.\n{one_dimension}",
    }.items():
        with pytest.raises(DataError) as error:
            TokenFiles(file, length=4)
        assert str(error.value) == text
    for name in ("objects", "short", "text"):
        with pytest.raises(DataError, match=rf"{name}\.npy is not a whole \.npy file: .*\nWrite it with numpy\.save"):
            TokenFiles(tmp_path / f"{name}.npy", length=4)
    with pytest.raises(DataError) as error:
        TokenFiles(path, length=4, header_bytes=256)
    assert str(error.value) == (
        f"{path} has 1001 bytes, 256 of them a header, which is not a whole number of uint16 tokens.\n{advice}"
    )


def test_wrong_arguments_are_refused(tmp_path):
    path = write(tmp_path / "a.bin", range(4))
    for settings, text in (
        ({"length": 0}, "length=0 is too small.\nGive at least 1."),
        ({"length": 1, "stride": 0}, "stride=0 is too small.\nGive at least 1."),
        (
            {"length": 1, "dtype": "float32"},
            "dtype='float32' is not an integer type.\nGive one, such as \"uint16\".",
        ),
        (
            {"length": 1, "dtype": "unit16"},
            "dtype='unit16' is not an integer type.\nGive one, such as \"uint16\".",
        ),
        (
            {"length": 4},
            f"No file contains a window of 5 tokens: the longest, {path}, has 4.\nMake length smaller.",
        ),
    ):
        with pytest.raises(ConfigurationError) as error:
            TokenFiles(path, **settings)
        assert str(error.value) == text
    with pytest.raises(ConfigurationError) as error:
        TokenFiles([path, tmp_path / "*.bin"], length=1)
    assert str(error.value) == f"{path} is given twice, so its samples would count twice.\nGive each file once."
    with pytest.raises(ConfigurationError) as error:
        TokenFiles([], length=1)
    assert str(error.value) == "No files are given.\nGive the path of at least one."
    with pytest.raises(IndexError, match="window 3 of 3"):
        TokenFiles(path, length=1)[3]


def test_a_file_that_is_cut_short_later_is_named_with_byte_and_sample(tmp_path):
    path = write(tmp_path / "a.bin", range(100))
    data = TokenFiles(path, length=4)
    assert data[20][0].tolist() == [80, 81, 82, 83]
    os.truncate(path, 164)
    assert data[19][0].tolist() == [76, 77, 78, 79]
    with pytest.raises(DataError) as error:
        data[20]
    assert str(error.value) == (
        f"{path} ends at byte 164, but sample 20 lies at bytes 160 to 170.\n"
        "The file was truncated after the data set was created. Restore it and resume."
    )
    assert (error.value.file, error.value.offset, error.value.sample) == (str(path), 160, 20)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (str(copy), copy.file, copy.offset, copy.sample) == (str(error.value), str(path), 160, 20)


def test_a_file_that_is_gone_is_named(tmp_path):
    path = write(tmp_path / "a.bin", range(100))
    data = TokenFiles(path, length=4)
    path.unlink()
    with pytest.raises(DataError) as error:
        data[1]
    assert str(error.value) == (
        f"{path} cannot be read at byte 8, for sample 1: No such file or directory.\n"
        "Check that the file is still there, and that this machine sees it."
    )


def test_reads_that_come_in_pieces_are_put_together(tmp_path, monkeypatch):
    path = write(tmp_path / "a.bin", range(100), "uint8")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 7), offset))
    data = TokenFiles(path, length=60, dtype="uint8", target=False)
    assert data[0].tolist() == list(range(60))


FLAT = """
import random, sys, psutil
from lockstep.data import TokenFiles
data = TokenFiles(sys.argv[1], length=1023)
for index in range(100):
    data[index]
process = psutil.Process()
before = process.memory_info().rss
for _ in range(20_000):
    data[random.randrange(len(data))]
print(process.memory_info().rss - before)
"""


@pytest.mark.soak
def test_memory_stays_flat_over_a_file_larger_than_it(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**31)  # sparse: takes no room on the disk
    done = subprocess.run(
        [sys.executable, "-c", FLAT, str(path)], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(done.stdout) < 4 * 2**20
