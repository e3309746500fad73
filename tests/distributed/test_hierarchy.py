"""The backend shm on several machines: its stages inside and between machines give what one group gives."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.comm import hierarchy
from lockstep.comm.collectives import all_gather_flat, backend_name, reduce_scatter_slices
from lockstep.errors import CollectiveError, ConfigurationError
from tests.models import soak
from tests.shm import shm_group

MACHINES = {"blocks": [0, 0, 1, 1], "alternating": [0, 1, 0, 1]}


@contextmanager
def on_machines(world, machines):
    """A group of the pool's ranks, rank r on machine ``machines[r]``."""
    with mock.patch.object(hierarchy, "machine_id", return_value=str(machines[world.rank])), shm_group() as group:
        yield group


def mine_of(size, dtype=torch.float64, *, rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kind", [*soak(["blocks"]), "alternating"])
def test_collectives_do_what_gloo_does_and_leave_the_same_bits_on_all_ranks(ranks, kind):
    def body(world):
        with on_machines(world, MACHINES[kind]) as group:
            assert backend_name(group) == "shm+gloo"
            bad, results = [], []
            for size in (0, 1, 3, 4, 1001, 300_004):
                everyone = [mine_of(size, rank=rank) for rank in range(4)]
                for op, expected in (
                    (dist.ReduceOp.SUM, sum(everyone)),
                    (dist.ReduceOp.MAX, torch.stack(everyone).amax(0)),
                ):
                    tensor = everyone[world.rank].clone()
                    dist.all_reduce(tensor, op, group=group)
                    results.append(tensor)
                    bad += [(size, op)] * (not torch.allclose(tensor, expected, rtol=1e-13, atol=1e-13))
                for root in range(4):
                    tensor = everyone[world.rank].clone()
                    dist.broadcast(tensor, root, group=group)
                    bad += [(size, "broadcast", root)] * (not torch.equal(tensor, everyone[root]))
                output = torch.empty(4 * size, dtype=torch.float64)
                all_gather_flat(output, everyone[world.rank], group=group).wait()
                bad += [(size, "all_gather")] * (not torch.equal(output, torch.cat(everyone)))
                wide = [mine_of(4 * size, rank=10 + rank) for rank in range(4)]
                own = torch.empty(size, dtype=torch.float64)
                group._reduce_scatter_base(own, wide[world.rank], dist.ReduceScatterOptions()).wait()
                expected = sum(wide)[world.rank * size : (world.rank + 1) * size]
                bad += [(size, "reduce_scatter")] * (not torch.allclose(own, expected, rtol=1e-13, atol=1e-13))
                bad += [(size, "input changed")] * (
                    not torch.equal(wide[world.rank], mine_of(4 * size, rank=10 + world.rank))
                )
            # What is not staged is Gloo's: an exchange, a transposed tensor, sends.
            received = torch.empty(4)
            dist.all_to_all_single(received, torch.arange(4.0) + 10 * world.rank, group=group)
            bad += ["all_to_all"] * (received.tolist() != [10.0 * rank + world.rank for rank in range(4)])
            if world.rank == 0:
                dist.send(torch.ones(3), 3, group=group)
            elif world.rank == 3:
                dist.recv(received[:3], 0, group=group)
                bad += ["recv"] * (received[:3].tolist() != [1.0] * 3)
            dist.barrier(group=group)
            works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(5)]
            bad += ["async"] * any(work.wait() is None or work.result()[0].sum() != 4000 for work in works)
            twice, pair = torch.ones(3), [torch.ones(1), torch.full((1,), 5.0)]
            group.allreduce_coalesced([twice[:2], twice[1:]]).wait()
            group.allreduce(pair).wait()
            bad += ["coalesced"] * (twice.tolist() != [4.0] * 3) + ["list"] * ([x.item() for x in pair] != [24.0] * 2)
            for call in (lambda: group.broadcast(twice, root=4), lambda: group._allgather_base(twice, twice)):
                with pytest.raises(ConfigurationError, match="the group stays usable"):
                    call()
            group.broadcast(twice.mul_(world.rank), root=2).wait()
            bad += ["broadcast after errors"] * (twice.tolist() != [8.0] * 3)
            return bad, [result.numpy().tobytes() for result in results]

    answers = ranks(4)(body)
    assert [bad for bad, _ in answers] == [[]] * 4
    assert all(bits == answers[0][1] for _, bits in answers), "ranks have different bits"


def train(model, optimizer, batches):
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).double()


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "zero"])
def test_a_run_is_that_of_one_process(ranks, shards):
    def body(world):
        batches = [mine_of((8, 7), rank=step) for step in range(4)]
        with on_machines(world, MACHINES["alternating"]) as group:
            model = lockstep.DistributedDataParallel(network(), process_group=group)
            if shards:
                kwargs = {"process_group": group, "shard_gradients": True}
                optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **kwargs)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            found = train(model, optimizer, [batch[2 * world.rank : 2 * world.rank + 2] for batch in batches])
        single = network()
        expected = train(single, torch.optim.AdamW(single.parameters(), lr=0.01), batches)
        return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)), [
            each.numpy().tobytes() for each in found
        ]

    answers = ranks(4)(body)
    assert max(error for error, _ in answers) < 1e-12
    assert all(bits == answers[0][1] for _, bits in answers)


def test_a_carrier_that_fails_between_machines_is_named_to_the_ranks_beside_it(ranks):
    def body(world):
        with mock.patch.object(hierarchy, "machine_id", return_value=str(world.rank // 2)), shm_group() as group:
            if world.rank in (2, 3):
                return ""  # the other machine takes no part: its connections close
            try:
                if world.rank == 0:
                    group._gloo = mock.Mock(allreduce=mock.Mock(side_effect=RuntimeError("Connection closed by peer")))
                else:
                    group._gloo = mock.Mock()
                dist.all_reduce(torch.ones(1000), group=group)
            except CollectiveError as error:
                group.abort()
                return str(error)

    first, second, *_ = ranks(4)(body)
    assert "Rank 0 in allreduce between machines, with ranks 0, 2 of the group: Connection closed by peer" in first
    assert "waited for rank 0, which gave up" in second


def test_ranks_of_one_machine_each_get_gloo_and_the_group_of_all_is_shared_memory(ranks):
    def body(world):
        with mock.patch.object(hierarchy, "machine_id", return_value=str(world.rank)), shm_group() as group:
            name = backend_name(group)
        with shm_group() as group:
            return name, backend_name(group), isinstance(group, hierarchy.HierarchicalProcessGroup)

    assert ranks(2)(body) == [("gloo", "shm", False)] * 2


def test_machines_with_different_numbers_of_ranks_get_gloo(ranks):
    def body(world):
        with on_machines(world, [0, 0, 1]) as group:
            tensor = torch.full((7,), float(world.rank))
            dist.all_reduce(tensor, group=group)
            return backend_name(group), tensor.tolist()

    assert ranks(3)(body) == [("gloo", [3.0] * 7)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gloo_scatters_the_sum_by_an_exchange(ranks, dtype):
    def body(world):
        everyone = [torch.arange(12).to(dtype) * (rank + 1) for rank in range(3)]
        flat = everyone[world.rank].clone()
        reduce_scatter_slices(flat, group=dist.group.WORLD).wait()
        mine = slice(4 * world.rank, 4 * world.rank + 4)
        return torch.equal(flat[mine], sum(everyone)[mine])

    assert ranks(3)(body) == [True] * 3


def test_diloco_sends_a_slice_compressed_and_all_ranks_get_the_same_bits(ranks):
    def body(world):
        batches = [mine_of((4, 7), torch.float32, rank=10 * world.rank + step) for step in range(9)]
        found = {}
        for compression in (None, "int8"):
            with on_machines(world, MACHINES["alternating"]) as group:
                model = network().float()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                kwargs = {"sync_every": 4, "sync_delay": 2, "compression": compression, "process_group": group}
                with lockstep.DiLoCo(model, optimizer, **kwargs) as averaging:
                    train(model, optimizer, batches)
                    averaging.sync()
                found[compression] = torch.cat([each.detach().flatten() for each in model.parameters()])
        return found

    first, *others = ranks(4)(body)
    for compression in (None, "int8"):
        assert all(torch.equal(first[compression], each[compression]) for each in others)
    start = torch.cat([each.detach().float().flatten() for each in network().parameters()])
    error, moved = ((first["int8"] - other).norm() for other in (first[None], start))
    assert 0 < error < 0.05 * moved
