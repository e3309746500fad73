"""Which part of a global batch is whose."""

import pytest
import torch

from lockstep.data.order import BatchSplit

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
