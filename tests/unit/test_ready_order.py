"""What ranks saw in the first step becomes one order."""

from lockstep.parallel.ddp.buckets import ReadyOrder, merge_arrivals


def test_the_rank_that_saw_most_decides():
    merged = merge_arrivals([[3, 1], [2, 3, 1], [1, 2, 3]], default=[3, 2, 1, 0])
    assert merged == ReadyOrder((2, 3, 1, 0), frozenset(), is_uneven=True)


def test_a_parameter_stands_where_it_arrived_last():
    merged = merge_arrivals([[2, 1, 2, 0]], default=[2, 1, 0])
    assert merged == ReadyOrder((1, 2, 0), frozenset({2}))


def test_repeats_on_any_rank_count():
    merged = merge_arrivals([[2, 1, 0], [1, 1]], default=[2, 1, 0])
    assert merged == ReadyOrder((2, 1, 0), frozenset({1}), is_uneven=True)


def test_ranks_without_data_are_not_uneven():
    assert not merge_arrivals([[1, 0], [], [1, 0]], default=[1, 0]).is_uneven


def test_nobody_saw_anything():
    assert merge_arrivals([[], []], default=[1, 0]) == ReadyOrder((1, 0), frozenset())
