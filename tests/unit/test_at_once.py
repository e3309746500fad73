"""Micro-batches that are read at once are what they would be one by one."""

import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from lockstep.data import TokenFiles
from lockstep.data.loader import LoadOptions, Request, batched_getitem, load


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return type(ours) is list and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def check(samples, collate=None):
    read, indices = batched_getitem(samples, collate), [3, 0, 7, 3]
    assert same(read(indices), (collate or default_collate)([samples[index] for index in indices]))


def test_tensors_and_token_files(tmp_path):
    check(TensorDataset(torch.randn(9, 3), torch.arange(9)))
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    check(TokenFiles(tmp_path / "a.bin", length=5))
    check(TokenFiles(tmp_path / "a.bin", length=5, target=False))


@pytest.mark.parametrize("form", ["torch", None])
def test_rows_of_tables(form):
    datasets = pytest.importorskip("datasets")
    columns = {"x": [0.5 * row for row in range(9)], "y": list(range(9)), "t": list("abcdefghi")}
    check(datasets.Dataset.from_dict(columns).with_format(form))
    ragged = datasets.Dataset.from_dict({"x": [[1] * row for row in range(9)]}).with_format(form)
    check(ragged, collate=lambda rows: [torch.as_tensor(row["x"]) for row in rows])


def test_what_may_draw_random_numbers_is_read_one_by_one(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(9))})
    rows.set_transform(lambda batch: {"x": [x + random.random() for x in batch["x"]]})

    class Noisy(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + torch.rand(())

    assert batched_getitem(rows, None) is None
    assert batched_getitem(rows.with_format("numpy"), None) is None, "a batch of its floats has another dtype"
    assert batched_getitem(Noisy(torch.arange(3)), None) is None
    assert batched_getitem([1, 2], None) is None
    assert batched_getitem(TensorDataset(torch.arange(3)), list) is None
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert batched_getitem(TokenFiles(tmp_path / "a.bin", length=5), list) is None


def test_a_batch_that_cannot_be_read_at_once_is_read_one_by_one_to_find_out_why(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    samples = TokenFiles(path, length=9)
    os.truncate(path, 110)
    how = LoadOptions(None, 0, pin_memory=False, skip_bad=True)
    (micro,) = load(samples, [Request(0, 0, 4, {0: [0, 9, 2, 7]})], how, seed=0)
    assert [inputs[0].item() for inputs in micro.batches[0][0]] == [0, 18]
    assert [(bad.sample, bad.file, bad.offset) for bad in micro.bad] == [
        (9, str(path), 162),
        (7, str(path), 126),
    ]
