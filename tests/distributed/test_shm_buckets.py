"""Tensors in memory that all ranks map: reduced where they lie."""

import gc

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.collectives import Pieces, all_gather_slices, all_reduce_work, reduce_scatter_slices, wait_for
from lockstep.comm.shm import segment
from tests.shm import empty_shared, shm_group


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_reduce_in_place_has_the_bits_of_one_with_copies(ranks, num_ranks):
    def body(world):
        bad = []
        with shm_group() as group:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                for size in (1, 5003, 200_003):
                    shared = empty_shared(size, dtype=dtype, group=group)
                    shared.copy_(torch.randn(size))
                    for view in (shared, shared[size // 3 :]):
                        copied = view.clone()
                        assert group.shm_ops.buffers.find(view)[0] >= 0 and group.shm_ops.buffers.find(copied)[0] < 0
                        dist.all_reduce(view, dist.ReduceOp.AVG, group=group)
                        dist.all_reduce(copied, dist.ReduceOp.AVG, group=group)
                        if not torch.equal(view, copied):
                            bad.append((dtype, size, view.numel()))
        return bad

    assert ranks(num_ranks)(body) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_slices_are_reduced_and_gathered_in_place(ranks, num_ranks):
    def body(world):
        results = []
        with shm_group() as group:
            for size in (1, 40_001):
                for mine in (empty_shared(size * num_ranks, dtype=torch.float64, group=group), None):
                    flat = torch.empty(size * num_ranks, dtype=torch.float64) if mine is None else mine
                    own = flat[world.rank * size : (world.rank + 1) * size]
                    assert (group.shm_ops.buffers.find(own)[0] >= 0) == (mine is not None)
                    values = torch.arange(size * num_ranks, dtype=torch.float64)
                    flat.copy_(values * (world.rank + 1))
                    wait_for(reduce_scatter_slices(flat, group=group))
                    total = num_ranks * (num_ranks + 1) // 2
                    scattered = torch.equal(own, values.chunk(num_ranks)[world.rank] * total)
                    wait_for(all_gather_slices(flat, group=group))
                    results.append((scattered, torch.equal(flat, values * total)))
        return results

    assert ranks(num_ranks)(body) == [[(True, True)] * 4] * num_ranks


def reduce_both_ways(group, rank, flat, sizes, factor, alone):
    """Return whether a reduction that fills a tensor from pieces gives the bits of one that finds it filled."""
    numel, end = flat.numel(), flat.numel() // group.size() * group.size()
    own = slice(rank * (end // group.size()), (rank + 1) * (end // group.size()))
    pieces = Pieces([torch.randn(size, dtype=flat.dtype) for size in sizes], factor)
    behind = torch.randn(numel - sum(sizes), dtype=flat.dtype)
    filled = torch.cat([*(piece * factor for piece in pieces.tensors), behind])
    results = []
    for scatters in (False, True):
        expected = filled.clone()
        flat[sum(sizes) :] = behind
        if scatters:
            wait_for(reduce_scatter_slices(expected[:end], group=group, alone=alone))
            wait_for(reduce_scatter_slices(flat[:end], group=group, alone=alone, pieces=pieces))
            results += [torch.equal(flat[own], expected[own]), torch.equal(flat[end:], expected[end:])]
        else:
            wait_for(all_reduce_work(expected, group=group, alone=alone))
            wait_for(all_reduce_work(flat, group=group, alone=alone, pieces=pieces))
            results.append(torch.equal(flat, expected))
    return all(results)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_reduction_fills_its_tensor_from_pieces(ranks, num_ranks):
    """Small and large tensors, which lie in shared memory on all ranks, on some, on none; their ends too."""

    def body(world):
        bad = []
        torch.manual_seed(world.rank)
        with shm_group() as group:
            for dtype in (torch.float32, torch.float64):
                for sizes, rest in (
                    ((1, 1), 1),
                    ((100, 1, 7000), 3),
                    ((30_000, 90_001, 1, 50_000), 200),
                    ((5,), 90_000),
                ):
                    size = sum(sizes) + rest
                    shared = empty_shared(size, dtype=dtype, group=group)
                    ordinary = torch.empty(size, dtype=dtype)
                    for flat in (shared, ordinary, shared if world.rank else ordinary):
                        for factor, alone in ((1.0, False), (1 / 3, True)):
                            if not reduce_both_ways(group, world.rank, flat, sizes, factor, alone):
                                bad.append((dtype, size, factor, flat is shared))
        return bad

    assert ranks(num_ranks)(body) == [[]] * num_ranks


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_rank_goes_on_if_others_are_late_for_a_call_that_it_has_begun(ranks, is_scattered):
    """The late one comes only behind a barrier that waits for the first: to wait for it here would be a deadlock."""

    def body(world):
        with shm_group() as group:
            flat = empty_shared(200_000, dtype=torch.float32, group=group)
            pieces = Pieces([torch.full((200_000,), world.rank + 1.0)], 0.5)
            if world.rank == 1:
                dist.barrier()
            start = reduce_scatter_slices if is_scattered else all_reduce_work
            work = start(flat, group=group, pieces=pieces)
            was_left_open = not work.is_completed()
            if world.rank == 0:
                dist.barrier()
            wait_for(work)
            own = flat[world.rank * 100_000 :][:100_000] if is_scattered else flat
            return was_left_open, own.unique().tolist()

    (was_left_open, first), (_, second) = ranks(2)(body)
    assert was_left_open and first == second == [1.5]


def test_slices_may_lie_in_shared_memory_on_some_ranks_only(ranks):
    def body(world):
        with shm_group() as group:
            shared = empty_shared(300_000, dtype=torch.float32, group=group)
            flat = shared if world.rank else torch.empty(300_000)
            flat.fill_(world.rank + 1.0)
            own = flat[world.rank * 150_000 : (world.rank + 1) * 150_000]
            wait_for(reduce_scatter_slices(flat, group=group))
            scattered = own.unique().tolist()
            own.fill_(world.rank + 5.0)
            wait_for(all_gather_slices(flat, group=group))
            return scattered, flat[::150_000].tolist(), flat.unique().tolist()

    assert ranks(2)(body) == [([3.0], [5.0, 6.0], [5.0, 6.0])] * 2


def test_who_changes_a_slice_after_the_gather_changes_nobody_elses(ranks):
    """Without the last wait, a slow rank would still read what a quick one writes for the next step."""

    def body(world):
        with shm_group() as group:
            flat = empty_shared(2_000_000, dtype=torch.float32, group=group)
            own = flat[world.rank * 1_000_000 : (world.rank + 1) * 1_000_000]
            seen = []
            for step in range(20):
                own.fill_(step)
                wait_for(all_gather_slices(flat, group=group))
                seen.append((flat == step).all().item())
                flat.fill_(step)
                wait_for(reduce_scatter_slices(flat, group=group))
                seen.append((own == 2 * step).all().item())
            return all(seen)

    assert ranks(2)(body) == [True, True]


def test_ranks_may_differ_in_where_their_tensor_lies(ranks):
    def body(world):
        with shm_group() as group:
            shared = empty_shared((400, 500), dtype=torch.float32, group=group)
            results = []
            for mine in (shared if world.rank else torch.empty(400, 500), shared[world.rank :].view(-1)[:150_000]):
                mine.fill_(world.rank + 1.0)
                dist.all_reduce(mine, group=group)
                results.append(mine.unique().tolist())
            return results

    assert ranks(2)(body) == [[[3.0], [3.0]]] * 2


def test_the_memory_goes_when_the_tensors_go(ranks):
    def body(world):
        def mapped():
            with open("/proc/self/maps") as maps:
                return sum("memfd:lockstep" in line for line in maps)

        before = mapped()
        with shm_group() as group:
            shared = empty_shared(1000, dtype=torch.float32, group=group)
            view = shared[10:20].fill_(1.0)
            del shared
            gc.collect()
            during = mapped()
            dist.all_reduce(view, group=group)
            again = empty_shared(1000, dtype=torch.float32, group=group)
            dist.all_reduce(again, group=group)
        dist.barrier()
        total = view.sum().item()  # outlives its group
        del view, again, group
        gc.collect()
        return during - before, total, mapped() - before

    assert ranks(2)(body) == [(2, 20.0, 0)] * 2


def test_without_room_the_tensor_is_an_ordinary_one_on_all_ranks(ranks):
    def body(world):
        def full(fd, start, length):
            raise OSError(28, "No space left on device")

        with shm_group() as group:
            original = segment.os.posix_fallocate
            segment.os.posix_fallocate = full
            try:
                tensor = empty_shared(1000, dtype=torch.float32, group=group)
            finally:
                segment.os.posix_fallocate = original
            tensor.fill_(1.0)
            dist.all_reduce(tensor, group=group)
            return group.shm_ops.buffers.find(tensor)[0], tensor.sum().item()

    assert ranks(2)(body) == [(-1, 2000.0)] * 2


def test_on_gloo_it_is_an_ordinary_tensor(ranks):
    def body(world):
        return empty_shared((2, 3), dtype=torch.int64, group=world.group).shape

    assert ranks(2)(body) == [(2, 3)] * 2
