"""The micro-batches of a process: which samples, in which order, with which random numbers."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from lockstep.data.loader import LoadOptions, load, load_order, train_requests
from lockstep.data.order import BatchSplit, GlobalOrder

ORDER = GlobalOrder(num_samples=10, batch_size=6, seed=3)


class Noisy(Dataset):
    """Each sample is its index and what Python, numpy and torch draw when it is loaded."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(()).item()


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
            for step, samples in rows(mine).items():
                divided.setdefault(step, []).extend(samples)
        assert divided == whole


def test_randomness_differs_between_samples_and_between_epochs():
    drawn = [value for samples in rows(micro_batches(4)).values() for _, *values in samples for value in values]
    assert len(set(drawn)) == 3 * 20


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
