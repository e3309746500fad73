"""Every collective of the backend shm against Gloo, which defines what it means, or against plain torch."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.shm import shm_group

ReduceOp = dist.ReduceOp
SIZES = [0, 1, 3, 1000, 4096, 5003, 70_001, 3_000_017]
"""Elements: none, one, odd, small and large ones of both ways, and more than the segment holds."""

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def numbers(size, dtype, rank):
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    low = -7 if dtype.is_signed else 0
    return torch.randint(low, 7, (size,), generator=generator).to(dtype)


def in_rank_order(op, tensors):
    """The reduction as the backend promises it: in the order of the ranks, halves in float."""
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else tensors[0].dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        tensor = tensor.to(wide)
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total = total + tensor
        elif op == ReduceOp.PRODUCT:
            total = total * tensor
        elif op == ReduceOp.MIN:
            total = torch.minimum(total, tensor)
        elif op == ReduceOp.MAX:
            total = torch.maximum(total, tensor)
        else:
            function = {ReduceOp.BAND: "bitwise_and", ReduceOp.BOR: "bitwise_or", ReduceOp.BXOR: "bitwise_xor"}[op]
            total = getattr(torch, function)(total, tensor)
    if op == ReduceOp.AVG:
        total = torch.div(total, len(tensors), rounding_mode=None if tensors[0].dtype in FLOATS else "trunc")
    return total.to(tensors[0].dtype)


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 4))])
def test_all_reduce_has_the_bits_of_a_sum_in_rank_order(ranks, num_ranks):
    def body(world):
        bad = []
        with shm_group() as group:
            for size in SIZES:
                for dtype in (FLOATS + INTEGERS) if size <= 5003 else FLOATS[:1] + FLOATS[3:]:
                    ops = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
                    ops += [] if dtype in FLOATS else [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
                    all_tensors = [numbers(size, dtype, rank) for rank in range(world.world_size)]
                    for op in ops if size <= 5003 else [ReduceOp.SUM, ReduceOp.AVG]:
                        mine = all_tensors[world.rank].clone()
                        dist.all_reduce(mine, op, group=group)
                        if not torch.equal(mine, in_rank_order(op, all_tensors)):
                            bad.append((size, dtype, str(op)))
        return bad

    assert ranks(num_ranks)(body) == [[]] * num_ranks


def test_all_reduce_of_other_dtypes_and_layouts(ranks):
    def body(world):
        with shm_group() as group:
            results = {}
            flag = torch.tensor([world.rank == 0, True, False])
            for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.BXOR):
                tensor = flag.clone()
                dist.all_reduce(tensor, op, group=group)
                results[str(op)] = tensor.tolist()
            complex_ = torch.tensor([1 + 2j, 3j]) * (world.rank + 1)
            dist.all_reduce(complex_, group=group)
            results["complex"] = complex_.tolist()
            strided = torch.arange(24.0).view(4, 6).t()[::2]
            dist.all_reduce(strided, group=group)
            results["strided"] = torch.equal(strided, 2 * torch.arange(24.0).view(4, 6).t()[::2])
            leaf = torch.ones(5, requires_grad=True)
            dist.all_reduce(leaf, group=group)
            results["leaf"] = leaf.tolist()
            scalar = torch.tensor(3.0)
            dist.all_reduce(scalar, group=group)
            results["scalar"] = scalar.item()
            indices, values = [[world.rank, 2]], [[1.0, 2.0], [3.0, 4.0]]
            sparse = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
            dist.all_reduce(sparse, group=group)
            results["sparse"] = sparse.to_dense().tolist()
            nan = torch.tensor([float("nan"), 1.0]) if world.rank else torch.tensor([0.0, 2.0])
            dist.all_reduce(nan, ReduceOp.MAX, group=group)
            results["nan"] = str(nan.tolist())
            return results

    # torch 2.11 warns about every sparse tensor that is made.
    first, second = ranks(2, warnings="ignore")(body)
    assert first == second
    assert first == {
        "RedOpType.SUM": [True, True, False],
        "RedOpType.MIN": [False, True, False],
        "RedOpType.BXOR": [True, False, False],
        "complex": [3 + 6j, 9j],
        "strided": True,
        "leaf": [2.0] * 5,
        "scalar": 6.0,
        "sparse": [[1.0, 2.0], [1.0, 2.0], [6.0, 8.0], [0.0, 0.0]],
        "nan": "[nan, 2.0]",
    }


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_other_collectives_do_as_gloo(ranks, num_ranks):
    def body(world):
        size, bad = world.world_size, []

        def check(name, call):
            ours, theirs = call(group), call(None)
            same = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
            if not same:
                bad.append(name)

        def run(length, dtype):
            # Whole numbers: Gloo adds in an order of its own.
            mine = (8 * numbers(length, dtype, world.rank)).to(torch.int64).to(dtype)

            def broadcast(group):
                tensor = mine.clone()
                dist.broadcast(tensor, size - 1, group=group)
                return [tensor]

            def all_gather(group):
                outputs = [torch.empty_like(mine) for _ in range(size)]
                dist.all_gather(outputs, mine, group=group)
                return outputs

            def all_gather_into_tensor(group):
                output = mine.new_empty(size * length)
                dist.all_gather_into_tensor(output, mine, group=group)
                return [output]

            def reduce_scatter(group):
                output = mine.clone()
                dist.reduce_scatter(output, [mine + rank for rank in range(size)], group=group)
                return [output]

            def reduce_scatter_tensor(group):
                output = mine.clone()
                dist.reduce_scatter_tensor(output, torch.cat([mine + rank for rank in range(size)]), group=group)
                return [output]

            def reduce(group):
                tensor = mine.clone()
                dist.reduce(tensor, 0, group=group)
                return [tensor] if world.rank == 0 else []

            def gather(group):
                outputs = [torch.empty_like(mine) for _ in range(size)] if world.rank == 0 else None
                dist.gather(mine, outputs, dst=0, group=group)
                return outputs or []

            def scatter(group):
                output = torch.empty_like(mine)
                inputs = [mine + rank for rank in range(size)] if world.rank == size - 1 else None
                dist.scatter(output, inputs, src=size - 1, group=group)
                return [output]

            def all_to_all_single(group):
                output = mine.new_empty(size * length)
                dist.all_to_all_single(output, torch.cat([mine + rank for rank in range(size)]), group=group)
                return [output]

            for call in (
                broadcast,
                all_gather,
                all_gather_into_tensor,
                reduce_scatter,
                reduce_scatter_tensor,
                reduce,
                gather,
                scatter,
                all_to_all_single,
            ):
                check(f"{call.__name__} {length} {dtype}", call)

        with shm_group() as group:
            for length in (1, 7, 5003, 700_001):
                run(length, torch.float64)
            for dtype in (torch.int64, torch.uint8, torch.float32):
                run(100, dtype)
            dist.barrier(group=group)
        return bad

    # torch has other names for two of them since 2.13.
    assert ranks(num_ranks, warnings="ignore")(body) == [[]] * num_ranks


def test_what_gloo_lacks(ranks):
    def body(world):
        rank, size = world.rank, world.world_size
        with shm_group() as group:
            inputs = [torch.full((target + 1,), 10 * rank + target) for target in range(size)]
            outputs = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(size)]
            dist.all_to_all(outputs, inputs, group=group)
            uneven = torch.empty(size * (rank + 1), dtype=torch.int64)
            splits = [target + 1 for target in range(size)]
            dist.all_to_all_single(uneven, torch.cat(inputs), [rank + 1] * size, splits, group=group)
            nothing = torch.empty(0)
            dist.broadcast(nothing, 0, group=group)
            dist.all_gather([torch.empty(0) for _ in range(size)], nothing, group=group)
            eight = torch.full((5,), float(rank)).to(torch.float8_e4m3fn)
            dist.broadcast(eight, 1, group=group)
            wide = torch.zeros(2, 3)
            dist.broadcast(wide.t() if rank else torch.arange(6.0).view(3, 2), 0, group=group)
            return [list(map(int, torch.cat(outputs))), uneven.tolist(), eight.float().tolist(), wide.t().tolist()]

    results = ranks(3)(body)
    for rank, (listed, single, eight, wide) in enumerate(results):
        assert listed == single == [10 * source + rank for source in range(3) for _ in range(rank + 1)]
        assert eight == [1.0] * 5
        assert wide == ([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] if rank else [[0.0] * 2] * 3)


def test_coalesced_calls(ranks):
    def body(world):
        with shm_group() as group:
            tensors = [torch.ones(3), torch.ones(70_000)]
            with dist._coalescing_manager(group=group):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)
            outputs = [torch.empty(2, dtype=torch.int64), torch.empty(6, dtype=torch.int64)]
            with dist._coalescing_manager(group=group, async_ops=True) as manager:
                for output, length in zip(outputs, (1, 3), strict=True):
                    dist.all_gather_into_tensor(output, torch.full((length,), world.rank), group=group)
            manager.wait()
            return [float(tensor.sum()) for tensor in tensors], [output.tolist() for output in outputs]

    assert ranks(2, warnings="ignore")(body) == [([6.0, 140_000.0], [[0, 1], [0, 0, 0, 1, 1, 1]])] * 2


def test_torch_refuses_to_split_a_group(ranks):
    def body(world):
        with shm_group() as group, pytest.raises(RuntimeError, match=r"not safe to split|does not support splitting"):
            dist.split_group(group, [[0, 1]])

    ranks(2)(body)


def test_all_overloads_of_torch_do_as_gloo(ranks):
    def body(world):
        rank, most = world.rank, ReduceOp.MAX

        def full(value=1.0, length=2):
            return torch.full((length,), value + rank)

        def run(tensors, call):
            work = call(*tensors)
            work.wait()
            return [part.tolist() for each in tensors for part in (each if isinstance(each, list) else [each])]

        def results(pg):
            pair, at_root = [full(), full()], [full(), full()] if rank == 0 else []
            twice, whole = full(), torch.ones(3)
            rows = [[full(0.0, 1), full(0.0)] for _ in range(2)]
            pg.allgather_coalesced(rows, [full(1.0, 1), full(5.0)]).wait()
            pg.allreduce_coalesced([whole[:2], whole[1:]]).wait()
            pg.monitored_barrier(timeout=timedelta(seconds=20))
            pg.barrier(timeout=timedelta(seconds=20)).wait()
            expanded = torch.ones(1).expand(3)
            pg.allreduce(expanded).wait()
            many = [[torch.zeros(1) for _ in range(4)] for _ in range(2)]
            gathered = pg.allgather(many, [full(1.0, 1), full(5.0, 1)])
            gathered.wait()
            return [
                [[part.tolist() for part in row] for row in (*rows, *many)],
                whole.tolist(),
                expanded.tolist(),
                run([full()], lambda x: pg.broadcast(x, root=1)),
                run([full()], lambda x: pg.broadcast(tensors=[x])),
                run([full(), full(5.0)], lambda x, y: pg.broadcast([x, y])),
                run([full()], lambda x: pg.allreduce(x, op=most)),
                run([full()], lambda x: pg.allreduce([x], most)),
                run([full(), full(5.0)], lambda x, y: pg.allreduce([x, y])),
                run([twice], lambda x: pg.allreduce_coalesced([x, x])),
                run([full()], lambda x: pg.reduce(x, root=0, op=most))[: 1 - rank],
                run([pair], lambda x: pg.allgather(input_tensor=full(), output_tensors=x)),
                run([at_root], lambda x: pg.gather(x, full(), root=0)),
                run([full(0.0)], lambda x: pg.scatter(x, [full(), full()] if rank == 0 else [], root=0)),
                run([full(0.0)], lambda x: pg.reduce_scatter(x, [full(), full()], op=most)),
                run([full(0.0, 4)], lambda x: pg.alltoall_base(x, full(1.0, 4), [], [])),
            ]

        with shm_group() as group:
            group.set_timeout(timedelta(seconds=15))
            return results(group) == results(dist.group.WORLD), group.comm.timeout_s

    assert ranks(2, warnings="ignore")(body) == [(True, 15.0)] * 2


def test_objects(ranks):
    def body(world):
        with shm_group() as group:
            everybody = [None] * world.world_size
            dist.all_gather_object(everybody, {"rank": world.rank, "data": "x" * (100_000 * world.rank)}, group=group)
            box = [("from", world.rank)]
            dist.broadcast_object_list(box, src=2, group=group)
            mine = [None]
            dist.scatter_object_list(mine, [["a"], ["b"], ["c"]] if world.rank == 0 else None, src=0, group=group)
            return [len(item["data"]) for item in everybody], box, mine

    assert ranks(3)(body) == [([0, 100_000, 200_000], [("from", 2)], [[letter]]) for letter in "abc"]


def test_asynchronous_calls_keep_their_order(ranks):
    def body(world):
        with shm_group() as group:
            tensors = [
                torch.full((size,), float(index)) for index, size in enumerate([5, 100_000, 0, 1, 3_000_000] * 4)
            ]
            works = []
            for index, tensor in enumerate(tensors):
                works.append(dist.all_reduce(tensor, group=group, async_op=True))
                if index % 7 == 0:
                    dist.barrier(group=group)
            futures = [work.get_future() for work in works[::2]]
            values = [future.wait()[0] for future in futures]
            for work in reversed(works):
                assert work.wait()
            assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
            assert all(
                value.data_ptr() == tensor.data_ptr() for value, tensor in zip(values, tensors[::2], strict=True)
            )
            chained = dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future()
            chained = chained.then(lambda future: future.value()[0] / 2)
            last = dist.all_reduce(tensors[0], group=group, async_op=True)
            while not last.is_completed():
                pass
            return [bool((tensor == 2.0 * index).all()) for index, tensor in enumerate(tensors)][
                1:
            ], chained.wait().tolist()

    assert ranks(2)(body) == [([True] * 19, [1.0] * 4)] * 2


def test_callbacks_of_futures_may_call_and_wait(ranks):
    def body(world):
        with shm_group() as group:

            def again(future):
                total = future.value()[0]
                dist.all_reduce(total, group=group, async_op=True).get_future().wait()
                dist.all_reduce(total, group=group)
                return total

            first = dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().then(again)
            return first.wait().tolist()

    assert ranks(2)(body) == [[8.0] * 4] * 2


def test_two_groups_may_be_used_in_another_order_on_each_rank(ranks):
    def body(world):
        with shm_group() as first, shm_group() as second:
            groups = [first, second] if world.rank else [second, first]
            tensors = [torch.ones(100_000) for _ in groups]
            works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
            for work in works:
                work.wait()
            return [float(tensor.sum()) for tensor in tensors]

    assert ranks(2)(body) == [[200_000.0, 200_000.0]] * 2


def test_groups_of_a_part_of_the_ranks(ranks):
    def body(world):
        with shm_group([0, 2]) as even, shm_group([1, 3]) as odd:
            mine = odd if world.rank % 2 else even
            tensor = torch.tensor([float(world.rank)])
            dist.all_reduce(tensor, group=mine)
            box = [world.rank]
            dist.broadcast_object_list(box, src=2 if world.rank % 2 == 0 else 3, group=mine)
            return tensor.item(), box

    assert ranks(4)(body) == [(2.0, [2]), (4.0, [3]), (2.0, [2]), (4.0, [3])]


def test_more_ranks_than_cores_sleep_instead_of_spinning(ranks):
    def body(world):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(list(before)[:1]))
        try:
            return together(world)
        finally:
            os.sched_setaffinity(0, before)

    def together(world):
        with shm_group() as group:
            tensor = torch.ones(1)
            for _ in range(50):
                dist.all_reduce(tensor, ReduceOp.MAX, group=group)
            large = torch.full((1_000_000,), float(world.rank))
            dist.all_reduce(large, group=group)
            return large[-1].item()

    assert ranks(4)(body) == [6.0] * 4
