"""Tensors in memory that all ranks map: reduced where they lie."""

import gc

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.shm import segment
from lockstep.comm.shm.allocate import empty_shared
from tests.shm import shm_group


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
                        assert group.calls.buckets.find(view)[0] >= 0 and group.calls.buckets.find(copied)[0] < 0
                        dist.all_reduce(view, dist.ReduceOp.AVG, group=group)
                        dist.all_reduce(copied, dist.ReduceOp.AVG, group=group)
                        if not torch.equal(view, copied):
                            bad.append((dtype, size, view.numel()))
        return bad

    assert ranks(num_ranks)(body) == [[]] * num_ranks


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
            return group.calls.buckets.find(tensor)[0], tensor.sum().item()

    assert ranks(2)(body) == [(-1, 2000.0)] * 2


def test_on_gloo_it_is_an_ordinary_tensor(ranks):
    def body(world):
        return empty_shared((2, 3), dtype=torch.int64, group=world.group).shape

    assert ranks(2)(body) == [(2, 3)] * 2
