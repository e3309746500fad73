"""`DistributedSampler` against torch's, and what it does beyond it."""

import warnings
from itertools import chain

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
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


def test_after_set_epoch_it_stays_in_that_epoch_as_torchs_does():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    list(sampler)
    for epoch in (5, None, 5, 0, None):
        for each in (sampler, torchs) if epoch is not None else ():
            each.set_epoch(epoch)
        assert sampler.epoch == torchs.epoch
        assert list(sampler) == list(torchs)


def test_setting_the_attribute_is_set_epoch():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    list(sampler)
    sampler.epoch = torchs.epoch = 4
    assert list(sampler) == list(torchs)
    assert sampler.epoch == 4


def test_a_pass_that_was_broken_off_or_not_read_does_not_end_an_epoch():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    next(iter(sampler))
    iter(sampler)
    assert list(sampler) == list(torchs)
    next(iter(sampler))
    torchs.set_epoch(1)
    assert list(sampler) == list(torchs)


def test_iterators_keep_their_epoch_and_two_that_are_read_together_are_one_pass():
    sampler, torchs = DistributedSampler(dataset(20), 2, 0), TorchSampler(dataset(20), 2, 0)
    first, second = iter(sampler), iter(sampler)
    order = list(torchs)
    assert [index for pair in zip(first, second, strict=True) for index in pair] == [i for i in order for _ in range(2)]
    torchs.set_epoch(1)
    third = iter(sampler)
    assert list(sampler) == list(torchs) == list(third)


LOADERS = [
    {"batch_size": 4},
    {"batch_size": 4, "num_workers": 1},  # reads all indices of the pass before the first batch
    {"batch_size": 4, "num_workers": 1, "persistent_workers": True},
    {"batch_size": None, "num_workers": 1},
]


@pytest.mark.parametrize("how", LOADERS, ids=str)
def test_a_look_at_one_batch_on_one_rank_loses_no_sample(how):
    def epochs(rank):
        loader = DataLoader(list(range(16)), sampler=DistributedSampler(range(16), 2, rank), **how)
        for _ in range(2):
            if rank == 0:
                next(iter(loader))
            yield [int(index) for batch in loader for index in torch.as_tensor(batch).flatten()]

    first, second = zip(epochs(0), epochs(1), strict=True)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(16))
    assert first != second


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("pad", [True, False])
def test_the_rest_of_an_epoch_is_divided_among_any_number_of_ranks(num_replicas, pad):
    before = [DistributedSampler(dataset(22), 2, rank, pad=pad) for rank in range(2)]
    iterators = [iter(sampler) for sampler in before]
    read = [next(iterator) for _ in range(4) for iterator in iterators]
    state = before[0].state_dict()
    assert state == {"epoch": 0, "position": 8}
    after = [DistributedSampler(dataset(22), num_replicas, rank, pad=pad) for rank in range(num_replicas)]
    for sampler in after:
        sampler.load_state_dict(state)
        next(iter(sampler))  # a look at the first
    rest = [list(sampler) for sampler in after]
    assert sorted({*read, *chain(*rest)}) == list(range(22))
    assert sum(map(len, rest)) == 14 + (-14 % num_replicas if pad else 0)
    if num_replicas == 2:
        assert rest == list(map(list, iterators))
    assert all(sampler.state_dict() == {"epoch": 0, "position": 22} for sampler in after)
    torchs = TorchSampler(dataset(22), num_replicas, 0)
    torchs.set_epoch(1)
    if pad:
        assert list(after[0]) == list(torchs)


@pytest.mark.parametrize(("call", "epoch", "length"), [(None, 1, 4), (0, 0, 0), (1, 1, 4)])
def test_a_state_of_the_end_of_an_epoch_begins_the_next_one_unless_the_script_sets_the_same(call, epoch, length):
    sampler = DistributedSampler(dataset(8), 2, 0)
    list(sampler)
    state = sampler.state_dict()
    assert state == {"epoch": 0, "position": 8}
    sampler = DistributedSampler(dataset(8), 2, 0)
    sampler.load_state_dict(state)
    if call is not None:
        sampler.set_epoch(call)
    assert (len(list(sampler)), sampler.epoch) == (length, epoch)


def test_a_script_that_sets_the_epoch_goes_on_in_the_middle_of_it():
    whole, sampler = DistributedSampler(dataset(20), 2, 1), DistributedSampler(dataset(20), 2, 1)
    sampler.load_state_dict({"epoch": 3, "position": 8})
    for epoch in (3, 4):
        whole.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(whole)[4 if epoch == 3 else 0 :]


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


@pytest.mark.parametrize("how", [{}, {"persistent_workers": True}, {"prefetch_factor": 1}], ids=str)
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_position_is_that_of_the_batches_that_a_loader_with_workers_has_returned(how, drop_last):
    sampler = DistributedSampler(range(46), 2, 0, pad=False)  # 23 for this rank: 5 batches of 4, and 3 more
    loader = DataLoader(range(46), batch_size=4, sampler=sampler, num_workers=2, drop_last=drop_last, **how)
    assert sampler.state_dict() == {"epoch": 0, "position": 0}
    for epoch in range(2):
        if how:  # a pass that is broken off does not count
            next(iter(loader))
            assert sampler.state_dict() == {"epoch": epoch, "position": 8}
        positions = []
        for _ in loader:
            positions.append(sampler.state_dict()["position"])
            assert sampler.epoch == epoch
        assert positions == ([8, 16, 24, 32, 46] if drop_last else [8, 16, 24, 32, 40, 46])


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": None},
        {"batch_sampler": lambda sampler: BatchSampler(sampler, 2, False)},
        # Of other sizes, and from an iterator that torch cannot watch.
        {"batch_sampler": lambda sampler: map(list, zip(*[iter(sampler)] * 2, strict=True))},
    ],
    ids=["one", "batches", "map"],
)
def test_the_position_follows_any_batches_that_are_read_in_order(how):
    sampler = DistributedSampler(range(24), 2, 0)
    how = {key: value and value(sampler) for key, value in how.items()}
    loader = DataLoader(range(24), num_workers=1, **({"sampler": sampler} if "batch_size" in how else {}), **how)
    batches, size = iter(loader), 1 if "batch_size" in how else 2
    for number in range(1, 4):
        next(batches)
        assert sampler.state_dict()["position"] == 2 * size * number


def test_torchdata_s_loader_saves_what_it_has_returned_and_the_sampler_says_the_same():
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        sampler = DistributedSampler(range(24), 2, 0)
        return sampler, loaders.StatefulDataLoader(range(24), batch_size=2, sampler=sampler, num_workers=2)

    with warnings.catch_warnings(action="ignore"):
        sampler, first = loader()
        batches = iter(first)
        seen = [next(batches).tolist() for _ in range(2)]
        assert sampler.state_dict() == {"epoch": 0, "position": 8}
        state = first.state_dict()
        rest = [batch.tolist() for batch in batches]
        sampler, second = loader()
        second.load_state_dict(state)
        batches = iter(second)
        assert [next(batches).tolist()] == rest[:1]
        assert sampler.state_dict() == {"epoch": 0, "position": 12}
        assert [batch.tolist() for batch in batches] == rest[1:]
    assert len(seen + rest) == 6


@pytest.mark.parametrize(("epoch", "length"), [(0, 0), (1, 4)])
def test_a_state_that_is_loaded_after_set_epoch_does_not_begin_another_epoch(epoch, length):
    sampler = DistributedSampler(dataset(8), 2, 0)
    sampler.set_epoch(epoch)
    sampler.load_state_dict({"epoch": 0, "position": 8})
    assert (len(list(sampler)), sampler.epoch) == (length, epoch)
