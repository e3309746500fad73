"""Which samples are in which global batch, and which part is whose."""

import pytest

from lockstep.data.order import GlobalOrder, cut, cut_by


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
