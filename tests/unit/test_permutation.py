"""A shuffle that is computed only where it is looked at."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from lockstep.data.order import GlobalOrder, Permutation

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
