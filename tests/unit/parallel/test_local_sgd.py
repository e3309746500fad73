"""What is exchanged when, and how a model is cut into fragments."""

import pytest

from lockstep.parallel.local_sgd import ExchangeSchedule, cut_fragments


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ExchangeSchedule(1), {step: [0] for step in range(1, 13)}),
        (ExchangeSchedule(5), {5: [0], 10: [0]}),
        (ExchangeSchedule(6, fragments=3), {2: [0], 4: [1], 6: [2], 8: [0], 10: [1], 12: [2]}),
        (ExchangeSchedule(5, fragments=2), {2: [0], 5: [1], 7: [0], 10: [1], 12: [0]}),
        (ExchangeSchedule(2, fragments=4), {1: [1, 2], 2: [0, 3], 3: [1, 2], 4: [0, 3]}),
    ],
)
def test_each_fragment_once_in_sync_every_steps(schedule, expected):
    last = max(expected)
    assert {step: due for step in range(1, last + 1) if (due := schedule.due(step))} == expected


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([10, 10, 10, 10], 2, [2, 2]),
        ([100, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 1, 1, 100], 3, [2, 1, 1]),
        ([1, 1, 1, 100], 2, [3, 1]),
        ([0, 0, 5], 3, [1, 1, 1]),
        ([7], 1, [1]),
        ([5, 1, 5, 1, 5, 1], 3, [2, 2, 2]),
    ],
)
def test_fragments_are_contiguous_balanced_and_never_empty(sizes, count, expected):
    parts = cut_fragments(sizes, count)
    assert [len(part) for part in parts] == expected
    assert [index for part in parts for index in part] == list(range(len(sizes)))
