"""The micro-batches of a process: which samples, in which order, with which random numbers."""

import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import random
import signal
import tempfile
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

import lockstep
from lockstep.base.containers import map_tensors
from lockstep.base.env import check_socket_folder
from lockstep.data import TokenFiles
from lockstep.data.loader import (
    LoadOptions,
    MicroBatch,
    Request,
    batched_getitem,
    explaining_worker_failures,
    load,
    load_order,
    to_device,
    train_requests,
)
from lockstep.data.order import BatchSplit, GlobalOrder
from lockstep.errors import ConfigurationError, LoaderDied
from tests.training import make_task, samples
from tests.unit.parallel.test_module_io import KINDS, assert_alike, value_in

ORDER = GlobalOrder(num_samples=10, batch_size=6, seed=3)


class Noisy(Dataset):
    """Each sample is its index and what Python, numpy and torch draw when it is loaded."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(()).item()


class Seldom(Noisy):
    """Samples that draw from one generator each, or from none; counts how often they are read."""

    def __init__(self, drawing):
        self.drawing, self.reads = drawing, []

    def __getitem__(self, index):
        self.reads.append(index)
        draws = [random.random, np.random.rand, lambda: torch.rand(()).item(), lambda: random.gauss(0, 1)]
        return index, draws[index % 4]() if index in self.drawing else 0.0


def micro_batches(num_items, *, rank=0, num_ranks=1, accumulate=1, first_step=0, workers=0, samples=None):
    split = BatchSplit(num_ranks, range(rank, rank + 1), accumulate)
    options = LoadOptions(None, workers, pin_memory=False)
    return list(islice(load_order(ORDER, samples or Noisy(), split, options, first_step, None), num_items))


def rows(micro_batches):
    """Return the samples, by step."""
    table = {}
    for micro in micro_batches:
        for batch in micro.batches:
            table.setdefault(micro.step, []).extend(zip(*(column.tolist() for column in batch), strict=True))
    return table


def test_a_step_has_the_same_samples_and_randomness_however_it_is_divided():
    whole = rows(micro_batches(4))
    assert [len(whole[step]) for step in range(4)] == [6, 4, 6, 4]
    assert [index for index, *_ in whole[1]] == ORDER.batch(1).tolist()
    for num_ranks, accumulate in ((2, 1), (3, 2), (1, 3)):
        divided = {}
        for rank in range(num_ranks):
            mine = micro_batches(4 * accumulate, rank=rank, num_ranks=num_ranks, accumulate=accumulate)
            assert [micro.step for micro in mine] == [step for step in range(4) for _ in range(accumulate)]
            for step, positions in rows(mine).items():
                divided.setdefault(step, []).extend(positions)
        assert divided == whole


def test_randomness_differs_between_samples_and_between_epochs():
    drawn = [value for samples in rows(micro_batches(4)).values() for _, *values in samples for value in values]
    assert len(set(drawn)) == 3 * 20


@pytest.mark.parametrize("drawing", [[1], [2, 4], [6], [3, 7]])
def test_samples_that_begin_to_draw_late_have_the_same_random_numbers(drawing):
    whole = rows(micro_batches(6, samples=Seldom(drawing)))
    alone = {step: rows(micro_batches(1, samples=Seldom(range(10)), first_step=step))[step] for step in range(6)}
    expected = {
        step: [(index, value if index in drawing else 0.0) for index, value in alone[step]] for step in range(6)
    }
    assert whole == expected
    assert any(value for samples in whole.values() for _, value in samples)


def test_samples_that_do_not_draw_are_read_once_and_have_one_seed_of_random_a_batch(monkeypatch):
    samples, seeds, seed = Seldom([]), [], random.seed
    batches = load_order(ORDER, samples, BatchSplit(1, range(1), 1), LoadOptions(None, 0, pin_memory=False), 0, None)
    next(batches)
    monkeypatch.setattr(random, "seed", lambda value: (seeds.append(value), seed(value)))
    assert len(list(islice(batches, 3))) == 3
    assert len(samples.reads) == 20
    assert seeds == [0] * 6  # before each batch, and for the number that is compared


class Asks(Noisy):
    """Draws nothing, but asks for the seed of torch and the state of numpy."""

    def __getitem__(self, index):
        return index, torch.initial_seed() % 2**31, int(np.random.get_state()[1][0])


def test_samples_that_ask_for_a_seed_without_drawing_have_one_each():
    table = rows(micro_batches(6, samples=Asks()))
    assert len({tuple(numbers) for samples in table.values() for _, *numbers in samples}) == 30
    assert rows(micro_batches(1, samples=Asks(), first_step=4)) == {4: table[4]}


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_change_nothing(workers):
    assert rows(micro_batches(5, workers=workers)) == rows(micro_batches(5))


def test_it_can_start_at_any_step():
    assert rows(micro_batches(2, first_step=3)) == {3: rows(micro_batches(4))[3], 4: rows(micro_batches(5))[4]}


def test_shares_without_samples_are_left_out():
    (micro, *_) = micro_batches(2, rank=2, num_ranks=8, first_step=1)
    assert (micro.num_global, micro.numbers, micro.sizes) == (4, [2], [1])
    assert micro.batches[0][0].tolist() == [ORDER.batch(1)[2].item()]
    (micro, *_) = micro_batches(2, rank=4, num_ranks=8, first_step=1)
    assert (micro.num_global, micro.numbers, micro.sizes, micro.batches) == (4, [], [], [])


def test_several_shares_of_one_process_are_collated_apart():
    requests = train_requests(ORDER, BatchSplit(4, range(4), 1), 1)
    micro = next(load(Noisy(), requests, LoadOptions(None, 0, pin_memory=False), seed=0))
    assert (micro.numbers, micro.sizes) == ([0, 1, 2, 3], [1, 1, 1, 1])
    assert [batch[0].tolist() for batch in micro.batches] == [[index] for index in ORDER.batch(1).tolist()]


def test_tensors_are_indexed_at_once_and_come_out_as_collated():
    samples = TensorDataset(torch.randn(10, 3), torch.arange(10))
    (micro,) = micro_batches(1, samples=samples)
    expected = default_collate([samples[index] for index in ORDER.batch(0).tolist()])
    assert type(micro.batches[0]) is type(expected) is list
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(micro.batches[0], expected, strict=True))


def test_loading_leaves_the_callers_generator_of_seeds_alone():
    torch.manual_seed(0)
    iterator = load(
        TensorDataset(torch.arange(10)),
        train_requests(ORDER, BatchSplit(1, range(1), 1), 0),
        LoadOptions(None, 0, pin_memory=False),
        seed=0,
    )
    next(iterator)
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert drawn == torch.rand(())


class Drawn(Dataset):
    """Draws its samples for each epoch, as for negative sampling."""

    def set_epoch(self, epoch):
        self.samples = [random.random() for _ in range(10)]

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.samples[index]


def test_what_a_data_set_draws_for_an_epoch_is_the_same_in_every_process():
    def read(state, workers):
        random.seed(state)
        batches = micro_batches(4, samples=Drawn(), workers=workers)
        return [micro.batches[0].tolist() for micro in batches]

    epochs = read(1, 0)
    assert epochs == read(2, 0) == read(1, 2)
    assert set(epochs[0]).isdisjoint(epochs[2])


# Micro-batches that are read at once are what they would be one by one.


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


# Batches of any structure, tensor by tensor.


Pair = namedtuple("Pair", "first second")


@dataclass
class Item:
    tensor: torch.Tensor
    text: str


def test_tensors_are_found_in_every_structure_and_the_rest_is_kept():
    one = torch.ones(())
    value = {
        "list": [one, (one, "text")],
        "pair": Pair(one, 3),
        "item": Item(one, "text"),
        "ordered": OrderedDict(a=one),
        "none": None,
        "class": Item,
    }
    assert map_tensors(value, lambda tensor: tensor + 1) == {
        "list": [2, (2, "text")],
        "pair": Pair(2, 3),
        "item": Item(torch.tensor(2.0), "text"),
        "ordered": OrderedDict(a=2),
        "none": None,
        "class": Item,
    }
    mapped = map_tensors(value, lambda tensor: tensor + 1)
    assert type(mapped["pair"]) is Pair
    assert type(mapped["ordered"]) is OrderedDict
    assert one == 1


def test_each_share_goes_to_the_device_of_its_number():
    batch = MicroBatch(0, 3, [4, 6], [np.arange(2), np.arange(1)], [[torch.ones(2)], [torch.ones(1)]])
    moved = to_device(batch, {4: torch.device("cpu"), 5: torch.device("cpu"), 6: torch.device("meta")})
    assert [share[0].device.type for share in moved.batches] == ["cpu", "meta"]
    assert moved.sizes == [2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_container_goes_to_the_device(kind):
    share = KINDS[kind](torch.ones(2))
    batch = MicroBatch(0, 2, [0], [np.arange(2)], [share])
    (moved,) = to_device(batch, {0: torch.device("meta")}).batches
    assert_alike(moved, share)
    assert value_in(moved).is_meta and not value_in(share).is_meta


class Graph:
    """An object that moves itself, as graph libraries have them."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        """Return it there."""
        return Graph(device.type)


def test_objects_that_move_themselves_do():
    words = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = MicroBatch(0, 1, [0], [np.arange(1)], [{"graph": Graph(), "words": words, "class": Graph, "text": "text"}])
    (moved,) = to_device(batch, {0: torch.device("meta")}).batches
    assert moved["graph"].device == "meta"
    assert moved["words"].data.is_meta
    assert not moved["words"].batch_sizes.is_meta
    assert (moved["class"], moved["text"]) == (Graph, "text")


# A loader process that is gone: what probably happened, and what to do.


class Deadly(Dataset):
    """Ends the process that loads the sample 7."""

    def __init__(self, death):
        self.death, self.samples = death, samples()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == 7:
            self.death()
        return self.samples[index]


def out_of_memory():
    """Die as the kernel makes a process die that takes too much."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once():
    """Die of what the code of a data set does."""
    os._exit(3)


def no_shared_memory():
    """Have the batch fail on its way to the process that trains, in a thread of multiprocessing's."""

    def dumps(_):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
        )

    multiprocessing.queues._ForkingPickler = SimpleNamespace(dumps=dumps, loads=pickle.loads)


@pytest.mark.parametrize(
    ("death", "how", "advice"),
    [
        (no_shared_memory, "exited unexpectedly with exit code 74.", "Most likely shared memory (/dev/shm) is full."),
        (out_of_memory, "is killed by signal: Killed.", "Most likely the machine ran out of memory."),
        (exit_at_once, "exited unexpectedly with exit code 3.", "Find out why with workers=0 (--workers 0)"),
    ],
)
def test_a_run_whose_loader_dies_says_why(death, how, advice):
    with pytest.raises(LoaderDied) as error:
        lockstep.fit(make_task(dataset=lambda: Deadly(death)), strategy="single", workers=2, epochs=1, quiet=True)
    head, _, tail = str(error.value).partition("\n")
    assert head.startswith("A loader process of rank 0 died: DataLoader worker (pid ")
    assert how in head
    assert tail.startswith(advice)
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible", "Most likely shared memory"),
        ("DataLoader worker (pid 12) is killed by signal: Segmentation fault.", "A native library"),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", "Find out why with workers=0 (--workers 0)"),
    ],
)
def test_other_deaths_have_other_advice(said, advice):
    with pytest.raises(LoaderDied) as caught, explaining_worker_failures(3):
        raise RuntimeError(said)
    assert str(caught.value).startswith(f"A loader process of rank 3 died: {said}\n{advice}")


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"), explaining_worker_failures(0):
        raise RuntimeError("CUDA error: out of memory")


# Loader processes whose sockets would have names that are too long.


careless = pytest.mark.skipif(
    hasattr(multiprocessing.util, "_SUN_PATH_MAX"), reason="this version of Python takes a shorter folder itself"
)


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    """A folder for temporary files with a long name, and no other one made so far."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", None)
    return folder


@careless
@pytest.mark.parametrize(("length", "expected"), [(75, False), (76, True)])
def test_how_long_it_may_be(monkeypatch, length, expected):
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", f"/{'x' * (length - 1)}/pymp-12345678")
    with pytest.raises(ConfigurationError) if expected else nullcontext():
        check_socket_folder()


@careless
def test_loader_processes_that_could_not_make_theirs_are_an_error(long_folder):
    with pytest.raises(ConfigurationError) as error:
        LoadOptions(None, workers=1, pin_memory=False).open(TensorDataset(torch.arange(4.0)))
    (made,) = long_folder.iterdir()
    assert str(error.value) == (
        "The name of the folder for temporary files is too long for loader processes, which pass tensors through "
        f"sockets in it: {made}\nSet a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
    )


def test_the_folder_that_a_launcher_has_chosen_counts(long_folder, monkeypatch):
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", "/tmp/pymp-12345678")
    check_socket_folder()
