"""`DistributedSampler` against torch's, and what it does beyond it."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from lockstep.data.sampler import DistributedSampler
from lockstep.errors import ConfigurationError


def dataset(size):
    return torch.utils.data.TensorDataset(torch.arange(size))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 11, 12, 13])
def test_the_indices_of_every_epoch_are_those_of_torch(size, drop_last, shuffle):
    for num_replicas in (1, 2, 4, 5):
        for rank in range(num_replicas):
            ours, torchs = (
                make(dataset(size), num_replicas, rank, shuffle, 7, drop_last)
                for make in (DistributedSampler, TorchSampler)
            )
            assert (len(ours), ours.num_samples, ours.total_size) == (
                len(torchs),
                torchs.num_samples,
                torchs.total_size,
            )
            for epoch in (0, 3, 1):
                ours.set_epoch(epoch)
                torchs.set_epoch(epoch)
                indices = list(ours)
                assert indices == list(torchs)
                assert len(indices) == len(ours)


def test_it_moves_on_to_the_next_epoch_by_itself():
    sampler, torchs = DistributedSampler(dataset(20), 2, 1), TorchSampler(dataset(20), 2, 1)
    for epoch in range(3):
        torchs.set_epoch(epoch)
        assert list(sampler) == list(torchs)
        assert sampler.epoch == epoch


def test_set_epoch_governs_the_next_iteration_and_later_ones_count_on_from_it():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    list(sampler)
    for call, epoch in ((5, 5), (None, 6), (5, 5), (5, 5), (0, 0), (None, 1)):
        if call is not None:
            sampler.set_epoch(call)
            assert sampler.epoch == call
        torchs.set_epoch(epoch)
        assert list(sampler) == list(torchs)
        assert sampler.epoch == epoch


def test_setting_the_attribute_is_set_epoch():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    list(sampler)
    sampler.epoch = torchs.epoch = 4
    assert list(sampler) == list(torchs)
    assert sampler.epoch == 4


def test_an_iteration_that_was_broken_off_counts_as_an_epoch():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    next(iter(sampler))
    torchs.set_epoch(1)
    assert list(sampler) == list(torchs)


def test_an_iterator_keeps_its_epoch_when_a_second_one_starts():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    first, second = iter(sampler), iter(sampler)
    assert list(first) == list(torchs)
    torchs.set_epoch(1)
    assert list(second) == list(torchs)


def test_loader_with_persistent_workers_gets_a_new_order_each_epoch():
    sampler, torchs = DistributedSampler(dataset(12), 2, 0), TorchSampler(dataset(12), 2, 0)
    loader = DataLoader(dataset(12), batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        torchs.set_epoch(epoch)
        assert torch.cat([batch for (batch,) in loader]).tolist() == list(torchs)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_without_padding_each_sample_is_given_exactly_once(size, num_replicas):
    samplers = [DistributedSampler(dataset(size), num_replicas, rank, pad=False) for rank in range(num_replicas)]
    for _ in range(2):
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        assert sorted(chain.from_iterable(parts)) == list(range(size))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert all(sampler.total_size == size for sampler in samplers)


def test_without_padding_drop_last_still_gives_equal_lengths():
    samplers = [DistributedSampler(dataset(11), 4, rank, drop_last=True, pad=False) for rank in range(4)]
    assert [len(list(sampler)) for sampler in samplers] == [2, 2, 2, 2]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_replicas_is_the_error_that_torch_gives(rank):
    with pytest.raises(ValueError) as torchs:
        TorchSampler(dataset(4), 2, rank)
    with pytest.raises(ConfigurationError) as ours:
        DistributedSampler(dataset(4), 2, rank)
    assert str(ours.value).splitlines() == [
        str(torchs.value),
        "Leave rank and num_replicas out to take them from the process group.",
    ]


def test_without_a_process_group_it_says_what_is_missing():
    with pytest.raises(ConfigurationError, match="Default process group has not been initialized"):
        DistributedSampler(dataset(4))
