"""Which samples are in which global batch, and which part is whose."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from lockstep.data.order import BatchSplit, GlobalOrder, Permutation, cut, cut_by


@pytest.mark.parametrize(("size", "num_parts", "sizes"), [(10, 3, [4, 3, 3]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])])
def test_parts_are_contiguous_and_the_empty_ones_come_last(size, num_parts, sizes):
    parts = [cut(size, num_parts, index) for index in range(num_parts)]
    assert [len(part) for part in parts] == sizes
    assert [position for part in parts for position in part] == list(range(size))


@pytest.mark.parametrize(
    ("size", "proportions", "sizes"),
    [
        (24, (2, 1, 1), [12, 6, 6]),
        (10, (2, 1, 1), [5, 3, 2]),  # 5, 2.5, 2.5
        (2, (2, 1, 1), [1, 1, 0]),  # 1, 0.5, 0.5
        (1, (1, 2), [0, 1]),
        (7, (0.5, 0.25, 1.0), [2, 1, 4]),
        (100, (1.37, 1), [58, 42]),
        (0, (3, 1), [0, 0]),
    ],
)
def test_parts_can_be_cut_by_proportions(size, proportions, sizes):
    parts = cut_by(size, proportions)
    assert [len(part) for part in parts] == sizes
    assert [position for part in parts for position in part] == list(range(size))


def test_equal_proportions_cut_into_equal_parts():
    for size in range(40):
        for num_parts in range(1, 9):
            for index in range(num_parts):
                assert cut_by(size, (0.3,) * num_parts)[index] == cut(size, num_parts, index)


def test_an_epoch_holds_each_sample_once_and_its_last_batch_what_is_left():
    order = GlobalOrder(num_samples=10, batch_size=4, seed=0)
    assert order.steps_per_epoch == 3
    for first_step in (0, 3):
        batches = [order.batch(first_step + k).tolist() for k in range(3)]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(sum(batches[1:], batches[0])) == list(range(10))


def test_a_last_batch_that_is_not_full_can_be_left_out():
    order = GlobalOrder(num_samples=10, batch_size=4, seed=0, drop_last=True)
    assert order.steps_per_epoch == 2
    assert [len(order.batch(step)) for step in range(4)] == [4, 4, 4, 4]
    assert order.batch(0).tolist() == GlobalOrder(10, 4, 0).batch(0).tolist()
    assert order.batch(2).tolist() == GlobalOrder(10, 4, 0).batch(3).tolist()


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_batch_size():
    def epoch(number, *, seed=0, batch_size=5):
        order = GlobalOrder(20, batch_size, seed)
        steps = range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch)
        return [index for step in steps for index in order.batch(step).tolist()]

    assert epoch(0) == epoch(0, batch_size=20) == epoch(0, batch_size=7)
    assert len({tuple(epoch(number, seed=seed)) for number in range(3) for seed in range(3)}) == 9


# Which part of a global batch is whose.


BATCH = torch.arange(100, 110)


def test_shares_follow_the_proportions_and_are_cut_into_micro_batches():
    split = BatchSplit(3, range(3), 2, proportions=(2, 1, 1))
    assert [split.positions(10, share) for share in range(3)] == [range(5), range(5, 8), range(8, 10)]
    assert split.micro_batches(BATCH) == [
        {0: [100, 101, 102], 1: [105, 106], 2: [108]},
        {0: [103, 104], 1: [107], 2: [109]},
    ]


def test_what_falls_to_a_process_is_contiguous():
    assert BatchSplit(4, range(1, 3), 1).positions_here(10) == range(3, 8)
    assert BatchSplit(3, range(1, 3), 1, proportions=(2, 1, 1)).positions_here(10) == range(5, 10)
    assert BatchSplit(4, range(1, 2), 1).positions_here(10) == range(3, 6)


def test_an_empty_share_in_the_middle_is_left_out():
    split = BatchSplit(3, range(3), 1, proportions=(5, 1, 5))
    assert split.micro_batches(BATCH[:2]) == [{0: [100], 2: [101]}]


@pytest.mark.parametrize("proportions", [None, (1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 5)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_whether_all_have_samples_is_known_to_every_process(proportions, accumulate):
    for size in range(20):
        parts = [
            BatchSplit(3, range(share, share + 1), accumulate, proportions).micro_batches(torch.arange(size))
            for share in range(3)
        ]
        for micro in range(accumulate):
            expected = all(part[micro] for part in parts)
            split = BatchSplit(3, range(1), accumulate, proportions)
            assert split.all_have_samples(size, micro) == expected


# A shuffle that is computed only where it is looked at.


LONG = 40_000
"""More than is kept as a table, and few enough to look at all."""


def whole(size, key=0):
    return Permutation(size, key)(range(size))


def spread(counts, expected):
    """Return by how many standard deviations chi-square of ``counts`` is off its mean, if all are equally likely."""
    degrees = len(counts) - 1
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("sizes", [range(1, 130), [1000, 2**14 - 1, 2**14, 2**14 + 1, 2**15, 2**15 + 1, 100_003]])
def test_it_holds_every_position_once(sizes):
    for size in sizes:
        assert torch.equal(whole(size).sort().values, torch.arange(size))


@pytest.mark.parametrize("size", [2**40 - 1, 2**40, 2**40 + 1, 3**30, 2**62])
def test_no_length_is_too_long(size):
    found = torch.cat([Permutation(size, 7)(range(start, start + 5000)) for start in (0, size // 2, size - 5000)])
    assert found.dtype == torch.int64
    assert len(found.unique()) == 15_000
    assert 0 <= found.min() <= found.max() < size


def test_any_positions_can_be_asked_for():
    for size in (100, LONG):
        permutation, expected = Permutation(size, 3), whole(size, 3)
        for positions in (range(10, 20), range(99, 9, -3), range(0), range(size - 1, size)):
            assert torch.equal(permutation(positions), expected[list(positions)])


def test_it_is_the_same_on_every_machine():
    # Runs of earlier versions are resumed: these numbers do not change.
    assert whole(10, 1).tolist() == [7, 9, 3, 4, 5, 8, 0, 6, 2, 1]
    assert Permutation(2**45, 1)(range(3)).tolist() == [3662712643985, 19395535792223, 25236039828444]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_is_equally_likely(size):
    num_orders = math.factorial(size)
    counts = Counter(tuple(whole(size, key).tolist()) for key in range(50 * num_orders))
    assert len(counts) == num_orders
    assert abs(spread(list(counts.values()), 50)) < 4


@pytest.mark.parametrize("size", [1000, 2**14 + 1, LONG])
def test_each_part_of_it_is_a_fair_sample_of_the_whole(size):
    found = whole(size).numpy()
    parts = np.array_split(found, 20)  # e.g. the batches
    for part in parts[::5]:
        counts = np.histogram(part, bins=10, range=(0, size))[0]
        assert spread(counts, len(part) / 10) < 4  # without replacement it is a little less than by chance
    remainders = [np.bincount(part % 8, minlength=8) for part in parts]
    for counts in remainders[::5]:
        assert spread(counts, sum(counts) / 8) < 4


def correlation(left, right):
    """Return the correlation, in standard deviations of that of independent orders."""
    return float(np.corrcoef(left, right)[0, 1]) * math.sqrt(len(left))


@pytest.mark.parametrize("size", [5000, 2**14 + 1, LONG])
def test_neighbours_are_not_correlated_nor_are_orders_with_other_keys(size):
    orders = [whole(size, key).numpy() for key in range(6)]
    for order in orders:
        for distance in (1, 2, 64):
            assert abs(correlation(order[:-distance], order[distance:])) < 4.5
        assert abs(correlation(order, np.arange(size))) < 4.5
    for left in range(6):
        for right in range(left):
            assert abs(correlation(orders[left], orders[right])) < 4.5
            assert (orders[left] == orders[right]).sum() < 10, "one fixed point is expected"


def test_the_orders_of_epochs_and_seeds_are_independent():
    def first(seed, epoch):
        order = GlobalOrder(10**12, 5000, seed)
        return order.batch(epoch * order.steps_per_epoch).numpy()

    orders = [first(seed, epoch) for seed in range(3) for epoch in range(3)]
    for index, order in enumerate(orders):
        for other in orders[:index]:
            assert abs(correlation(order, other)) < 4.5


def test_a_batch_of_a_long_data_set_takes_no_more_than_one_of_a_short_one():
    def peak_bytes(num_samples):
        order = GlobalOrder(num_samples, 256, seed=11)
        tracemalloc.start()
        order.batch(order.steps_per_epoch // 2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(2**50) < 1.2 * peak_bytes(2**17) < 2**21


def test_batches_that_lie_across_blocks_are_whole():
    order = GlobalOrder(LONG, 1000, seed=0)
    together = torch.cat([order.batch(step) for step in range(order.steps_per_epoch)])
    assert torch.equal(together.sort().values, torch.arange(LONG))
    assert torch.equal(torch.cat([order.batch(step) for step in (16, 17)]), GlobalOrder(LONG, 2000, 0).batch(8))
    assert torch.equal(GlobalOrder(LONG, LONG, 0).batch(0), together)
