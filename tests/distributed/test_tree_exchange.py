"""Sums over ranks in the tree: the bits of one process, chunk by chunk."""

import threading
import time

import pytest
import torch

from lockstep.base import activity
from lockstep.parallel import reduction_tree
from lockstep.parallel.reduction_tree import (
    GradientLayout,
    LeafPlacement,
    PairwiseAccumulator,
    TreeReduction,
)

NUM_LEAVES = 6
WAITING = "exchange of the reduction tree"
WEIGHTS = [torch.empty(700), torch.empty(1), torch.empty(90, dtype=torch.complex64), torch.empty(31, 7).bfloat16()] * 4


def leaf(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 10**number for weight in WEIGHTS]


def pushed(leaves, multiple_of):
    accumulator = PairwiseAccumulator(
        LeafPlacement((range(NUM_LEAVES),)).tree, GradientLayout(WEIGHTS, multiple_of=multiple_of), torch.device("cpu")
    )
    for number in leaves:
        accumulator.push(number, leaf(number))
    return accumulator.take()


@pytest.mark.parametrize("ranges", [(range(3), range(3, 6)), (range(4), range(4, 5), range(5, 6)), (range(6),)])
def test_the_ranks_get_the_bits_of_one_process(ranks, ranges):
    def sum_over_ranks(world):
        before, reduction_tree._CHUNK_BYTES = reduction_tree._CHUNK_BYTES, 2048
        try:
            placement = LeafPlacement(ranges)
            mine = pushed(ranges[world.rank], world.world_size)
            row = TreeReduction(placement, world.group).sum(mine)
            return len(row.flats), row.views
        finally:
            reduction_tree._CHUNK_BYTES = before

    expected = TreeReduction(LeafPlacement(ranges), None).sum(pushed(range(NUM_LEAVES), 1)).views
    for num_chunks, views in ranks(len(ranges))(sum_over_ranks):
        assert num_chunks > 6, "more than travel at the same time"
        for ours, theirs in zip(views, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()


def test_a_rank_that_stops_inside_the_exchange_is_told_from_those_that_wait(ranks, tmp_path):
    """So the watchdog can name it: what it reads of a rank is ``activity.now.collective``."""

    def run(world):
        before, reduction_tree._CHUNK_BYTES = reduction_tree._CHUNK_BYTES, 2048
        ranges = (range(3), range(3, 6))
        reduction, seen, flag = TreeReduction(LeafPlacement(ranges), world.group), [], tmp_path / "seen"
        sum_slice = reduction._sum_slice

        def stop(received):
            while not flag.exists():
                seen.append(activity.now.collective)
                time.sleep(0.02)
            return sum_slice(received)

        def watch():
            while seen[-20:] != [WAITING] * 20:
                seen.append(activity.now.collective)
                time.sleep(0.01)
            flag.touch()

        watcher = threading.Thread(target=watch)
        if world.rank == 1:
            reduction._sum_slice = stop
        else:
            watcher.start()
        try:
            reduction.sum(pushed(ranges[world.rank], world.world_size))
        finally:
            reduction_tree._CHUNK_BYTES = before
        if world.rank == 0:
            watcher.join()
        return set(seen[-20:])

    assert ranks(2)(run, timeout=30.0) == [{WAITING}, {""}]
