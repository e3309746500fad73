"""The backend of the simulated device does what ProcessGroupNCCL does: which waits, which copies, what hangs."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

import lockstep
from tests.models import relative_error


def own_device(world):
    device = torch.device("sim", world.rank)
    torch.sim.set_device(device)
    return device


def enqueued(world):
    """Rank 0 goes through all this before rank 1 has launched its part; if it waited, neither would get any further."""
    device = own_device(world)
    tensor = torch.full((4,), 1.0 + world.rank, device=device)
    if world.rank == 1:
        dist.all_reduce(torch.zeros(1))
        dist.all_reduce(tensor, async_op=True).wait()
        return None
    with torch.sim.counting() as counts:
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert future.done() and not work.is_completed()
        assert future.then(lambda done: done.value()[0]).wait() is not None
        work.wait()
        event = torch.Event(device)
        event.record()
        assert not event.query()
    assert counts.waits == [], counts.waits
    with pytest.raises(dist.DistBackendError, match="simccl: ALLREDUCE timed out in blocking wait"):
        work.wait(timedelta(milliseconds=100))
    dist.all_reduce(torch.zeros(1))
    event.synchronize()
    assert work.is_completed()
    return tensor.tolist()


def test_a_future_is_done_when_its_collective_is_enqueued(sim_ranks):
    assert sim_ranks(2)(enqueued)[0] == [3.0] * 4


def costs(world):
    device = own_device(world)
    mine, parts = torch.full((6,), 1.0 + world.rank, device=device), torch.empty(2, 6, device=device)
    own = torch.empty(3, device=device)
    found = {}
    collectives = {
        "all_gather": lambda: dist.all_gather(list(parts.unbind()), mine, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(parts, mine, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(own, list(mine.split(3)), async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(own, mine, async_op=True),
        "all_reduce": lambda: dist.all_reduce(mine.clone(), async_op=True),
    }
    for name, launch in collectives.items():
        with torch.sim.counting() as counts:
            work = launch()
            work.wait()
        assert counts.waits == [] and counts.collectives == 1
        (kernels,) = [n for stream, n in counts.kernels_by_stream.items() if "default" not in stream] or [0]
        found[name] = kernels, counts.allocations
        if name == "all_gather":  # one tensor, of which the list holds copies
            (flat,) = work.get_future().value()
            assert flat.tolist() == parts.tolist() == [[1.0] * 6, [2.0] * 6] and flat.shape == (2, 6)
        if name.startswith("reduce_scatter"):
            assert own.tolist() == [3.0] * 3
    return found


def test_a_list_of_tensors_costs_a_copy_for_each_rank(sim_ranks):
    expected = {"all_gather": (2, 1), "all_gather_into_tensor": (0, 0)}
    expected |= {"reduce_scatter": (2, 1), "reduce_scatter_tensor": (0, 0), "all_reduce": (0, 1)}
    assert sim_ranks(2, warnings="default")(costs) == [expected] * 2  # torch 2.13 has new names


def streams(world):
    """Without async_op a collective runs on the caller's stream; a barrier is the one that the host waits for."""
    device = own_device(world)
    tensor = torch.ones(4, device=device)
    torch.sim.synchronize()
    torch.sim.set_check("collect")
    for is_async in (False, True):
        work = dist.all_reduce(tensor, async_op=is_async)
        with torch.Stream(device):
            tensor.clone()
        if is_async:
            work.wait()
        torch.sim.synchronize()
    torch.sim.set_check("raise")
    on_callers, on_own = (text.splitlines()[1] for text in torch.sim.take_errors())
    assert on_callers.startswith(f"  before: the default stream of {device} writes 'output' of simccl ALLREDUCE at ")
    assert on_own.startswith("  before: stream ") and "writes 'output' of simccl ALLREDUCE at " in on_own
    with torch.sim.counting() as counts:
        dist.barrier(device_ids=[world.rank])
        dist.barrier(device_ids=[world.rank], async_op=True).wait()
    assert [wait.kind for wait in counts.waits] == ["barrier", "barrier"]
    return list(torch.sim.contexts())


def test_where_collectives_run(sim_ranks):
    sim_ranks(2)(streams)


# --- Several devices in a process


def two_devices(world):
    """Rank 0 cannot begin the first collective yet, and must not begin the second: rank 1 does them in order."""
    first, second = (torch.device("sim", 2 * world.rank + index) for index in range(2))
    small, large = torch.full((2,), 1.0, device=first), torch.full((1000,), 2.0, device=second)
    token = torch.zeros(1, device=first)
    received = dist.irecv(token, 1) if world.rank == 0 else None
    if received is not None:
        received.wait()
    works = [dist.all_reduce(each, async_op=True) for each in (small, large)]
    if world.rank == 1:
        dist.all_reduce(torch.zeros(1))  # so that both could have begun
        time.sleep(0.3)
        dist.isend(token, 0).wait()
    else:
        dist.all_reduce(torch.zeros(1))
    for work in works:
        work.wait()
    assert small.tolist() == [2.0] * 2 and large.unique().tolist() == [4.0]


class Halves(nn.Module):
    """A model that begins on one device and ends on another."""

    def __init__(self, devices):
        super().__init__()
        self.devices = devices
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16)).double().to(devices[0])
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double().to(devices[1])

    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


def halves(world, wrap):
    model = wrap(Halves([torch.device("sim", 2 * world.rank + index) for index in range(2)]))
    oracle = Halves(["cpu", "cpu"])
    for step in range(5):
        batch = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        oracle.zero_grad()
        model(batch.chunk(2)[world.rank]).square().mean().backward()
        oracle(batch).square().mean().backward()
        for found, expected in zip(model.parameters(), oracle.parameters(), strict=True):
            assert relative_error(found.grad.cpu(), expected.grad) < 1e-12


def test_the_lines_of_several_devices_keep_the_order_of_the_collectives(sim_ranks):
    sim_ranks(2)(two_devices)


@pytest.mark.parametrize("engine", ["torch", "lockstep"])
def test_a_model_on_two_devices_of_each_process(sim_ranks, engine):
    def run(world):
        wrap = lockstep.DistributedDataParallel if engine == "lockstep" else nn.parallel.DistributedDataParallel
        halves(world, lambda module: wrap(module, bucket_cap_mb=0.0005))

    sim_ranks(2, warnings="default")(run)


@pytest.mark.parametrize("engine", ["torch", "lockstep"])
@pytest.mark.parametrize("hook", ["pertensor", "perchannel"])
def test_the_quantization_hooks_of_torch(sim_ranks, engine, hook):
    """They read the result of an all-gather from its future: one tensor with a row for each rank."""

    def run(world):
        device = own_device(world)
        wrap = lockstep.DistributedDataParallel if engine == "lockstep" else nn.parallel.DistributedDataParallel
        torch.manual_seed(0)
        module = nn.Linear(20, 4)
        model = wrap(module.to(device))
        model.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, f"quantization_{hook}_hook"))
        batches = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
        model(batches[world.rank].to(device)).sum().backward()
        expected = batches.sum(1).mean(0).expand(4, 20)
        return relative_error(module.weight.grad.cpu(), expected)

    for error in sim_ranks(2, warnings="default")(run):
        assert error < 0.05


# --- Lost peers


def lost(world):
    """Rank 1 leaves a group in which rank 0 still waits for it."""
    device = own_device(world)
    group = dist.new_group(backend="cpu:gloo,sim:simccl")
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor, group=group)
    torch.sim.synchronize()
    if world.rank == 1:
        dist.distributed_c10d._abort_process_group(group)
        del group
        dist.all_reduce(torch.zeros(1))
        return None
    dist.all_reduce(torch.zeros(1))
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    event = torch.Event(device)
    tensor.add_(1)  # is queued
    event.record()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert not event.query(), "nothing ends, and nothing raises"
        time.sleep(0.05)
    dist.distributed_c10d._abort_process_group(group)
    event.synchronize()
    assert event.query()
    torch.sim.synchronize()
    return tensor.add(1).shape


def test_a_collective_with_a_lost_peer_hangs_until_it_is_aborted(sim_ranks):
    assert sim_ranks(2)(lost)[0] == (4,)


def test_a_process_whose_collective_hangs_can_end(sim_ranks):
    """Also with a group that nobody aborts, as when the pool ends a call: its workers stay usable."""

    def run(world):
        device = own_device(world)
        if world.rank == 1:
            return
        dist.all_reduce(torch.ones(4, device=device), async_op=True).wait()

    sim_ranks(2)(run, timeout=20.0)
    sim_ranks(2)(lambda world: dist.all_reduce(torch.ones(1, device=own_device(world))))


def sparse(world):
    own_device(world)
    group = dist.group.WORLD._get_backend(torch.device("sim"))
    with pytest.raises(RuntimeError, match="NCCL does not support all_reduce with sparse tensors"):
        group.allreduce(torch.eye(3, device="sim").to_sparse())
    with pytest.raises(RuntimeError, match="NCCL does not support all_reduce with sparse tensors"):
        dist.all_reduce(torch.eye(3, device="sim").to_sparse())
    with pytest.raises(ValueError, match="Tensors must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="sim")[:, :2])


def test_a_sparse_all_reduce_raises(sim_ranks):
    sim_ranks(2)(sparse)
