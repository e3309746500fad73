"""The simulated accelerator of tests/simulated_device computes as the CPU does, and finds what is not in order.

Everything runs in workers of the pool: autograd asks for the devices once in a process, at the first backward.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.base import accelerator
from lockstep.data import loader
from lockstep.parallel.ddp import comm_hooks
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, whole_batch

# --- It computes what the CPU computes


def train(device):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 36, 8)
    )
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, attention = model.double().to(device), attention.double().to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *attention.parameters()], lr=0.1, momentum=0.9)
    batch = torch.randn(6, 1, 8, 8, dtype=torch.float64).to(device)
    labels = torch.arange(6).to(device)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        noisy = batch + 0.1 * torch.randn_like(batch)
        loss = nn.functional.cross_entropy(attention(model(noisy)[:, None])[:, 0], labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), {name: value.cpu() for name, value in model.state_dict().items()}


def as_on_the_cpu(world):
    losses, state = train(f"sim:{world.rank}")
    expected_losses, expected_state = train("cpu")
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for name, value in expected_state.items():
        assert torch.allclose(value, state[name], rtol=1e-10, atol=1e-12), name


def test_training_is_that_of_the_cpu_with_the_same_random_numbers(sim_ranks):
    sim_ranks(2)(as_on_the_cpu)


def devices_apart(world):
    sim = torch.sim
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert sim.device_count() == torch.accelerator.device_count() == 4
    with sim.device(2):
        assert torch.zeros(2, device="sim").device == torch.device("sim:2")
    before = sim.memory_allocated(1)
    kept = torch.ones(1000, device="sim:1")
    # The smallest free block of at most twice the size, which may be one that a test before has left.
    assert 4096 <= sim.memory_allocated(1) - before <= 8192 and sim.max_memory_allocated(1) >= 4096
    address = kept.data_ptr()
    del kept
    assert torch.empty(1000, device="sim:1").data_ptr() == address, "the next allocation gets what was freed"
    sim.set_memory_limit(1 << 20, 3)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim out of memory. Tried to allocate 4.00 MiB. Device 3 has"):
        torch.empty(1 << 20, device="sim:3")
    torch.manual_seed(3)
    first = torch.randn(4, device="sim:0"), torch.randn(4, device="sim:1"), torch.randn(4)
    assert first[0].tolist() == first[1].tolist() == first[2].tolist()
    state = sim.get_rng_state(1)
    again = torch.rand(3, device="sim:1")
    sim.set_rng_state(state, 1)
    assert torch.equal(again, torch.rand(3, device="sim:1"))
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned() and torch.equal(pinned.to("sim:3", non_blocking=True).cpu(), pinned)
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = torch.ones(2, 2, device="sim") @ torch.ones(2, 2, device="sim")
        assert product.dtype is torch.bfloat16 and torch.softmax(product, 0).dtype is torch.float32


def test_devices_have_memory_random_numbers_and_autocast_of_their_own(sim_ranks):
    sim_ranks(1)(devices_apart)


def counts(world):
    model = nn.Linear(4, 4).to("sim:1")
    batch = torch.randn(3, 4)
    with torch.sim.counting() as counts:
        out = model(batch.to("sim:1"))
        total = out.sum().item()
    assert (counts.host_to_device_bytes, counts.device_to_host_bytes) == (48, 4) and total == out.sum().cpu()
    assert counts.kernels == 2 and counts.kernels_by_stream == {"the default stream of sim:1": 2}
    assert counts.synchronizations == 2 and counts.allocations == 3
    kinds = sorted(kind for kind, _ in counts.places if kind != "segment")
    assert kinds == ["device to host", "host to device", "synchronization", "synchronization"]
    assert all("test_simulated_device.py" in line and "counts" in line for _, line in counts.places)


def test_what_a_real_device_is_slowed_by_is_counted(sim_ranks):
    sim_ranks(1)(counts)


def buckets_are_registered(world):
    before, optimizers = torch.sim.registered_bytes(), []
    for disabled in ("1", "0"):
        with mock.patch.dict(os.environ, DDP_DISABLE_COMM_MEM=disabled):
            model = lockstep.DistributedDataParallel(nn.Linear(64, 64).to(world.device))
            optimizers.append(lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
            for _ in range(2):
                model(torch.ones(4, 64, device=world.device)).sum().backward()
                optimizers[-1].step()
                optimizers[-1].zero_grad()
        assert (torch.sim.registered_bytes() - before >= 4 * 65 * 64) == (disabled == "0")


def test_buckets_are_in_memory_that_the_backend_registers(sim_ranks):
    sim_ranks(2)(buckets_are_registered)


def backward_goes_on(world):
    """Rank 1 comes to its backward when rank 0 has computed its last gradient: before any bucket can be reduced."""
    torch.sim.set_backend_kind("nccl2")
    device, store = world.device, dist.distributed_c10d._get_default_store()
    model = lockstep.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(device), bucket_cap_mb=1e-4
    )
    computed, found = torch.Event(device), []

    def wait_for_stream(_):
        computed.record()
        end = time.monotonic() + 20.0
        while not computed.query() and time.monotonic() < end:
            time.sleep(0.002)
        found.append(computed.query())
        store.set("computed", "")

    for step in range(3):
        model.zero_grad()
        loss = model(torch.ones(4, 8, device=device)).sum()
        if step == 2 and world.rank == 0:
            model.module[0].weight.register_post_accumulate_grad_hook(wait_for_stream)
        elif step == 2:
            store.wait(["computed"])
        loss.backward()
    torch.accelerator.synchronize()
    torch.sim.set_backend_kind("nccl")
    assert found == [True] * (world.rank == 0)


def test_backward_goes_on_while_buckets_are_reduced_also_where_futures_order_streams(sim_ranks):
    sim_ranks(2)(backward_goes_on)


def reads_reduced_gradients(world, kind, settings):
    """The device raises an error at an access that no stream orders after the reduction."""
    torch.sim.set_backend_kind(kind)
    try:
        result = lockstep.fit(make_task(), strategy="ddp", steps=6, quiet=True, **settings)
    finally:
        torch.sim.set_backend_kind("nccl")
    assert torch.sim.take_errors() == []
    return result.losses


@pytest.mark.parametrize("kind", ["nccl2", "gloo"])
@pytest.mark.parametrize("settings", [{"clip": 1e9}, {"overlap_optimizer": True, "bucket_cap_mb": 1e-4}])
def test_buckets_that_finish_within_backward_are_in_order_over_each_backend(sim_ranks, kind, settings):
    """A norm is taken, or the parameters are updated, on a stream of its own."""
    expected = whole_batch(make_task(), 6)["losses"]
    assert sim_ranks(2)(reads_reduced_gradients, kind, settings) == [pytest.approx(expected, rel=1e-10)] * 2


def collectives(world):
    device = torch.device("sim", world.rank)
    mine = torch.arange(4.0, device=device) + world.rank
    with torch.sim.counting() as counts:
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        doubled = mine * 2
    assert counts.synchronizations == 0 and counts.collectives == 1, "wait() orders streams, the host goes on"
    assert doubled.tolist() == [2.0, 6.0, 10.0, 14.0]
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    assert mine.tolist() == [1.0, 3.0, 5.0, 7.0]
    gathered = torch.empty(2, 2, device=device)
    dist.all_gather(list(gathered.split(1)), torch.full((1, 2), 1.0 + world.rank, device=device))
    assert gathered.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    part = torch.empty(2, device=device)
    dist.reduce_scatter(part, list(torch.arange(4.0, device=device).split(2)))
    assert part.tolist() == [[0.0, 2.0], [4.0, 6.0]][world.rank]
    swapped = torch.empty(2, device=device)
    dist.all_to_all_single(swapped, torch.tensor([0.0, 1.0], device=device) + 10 * world.rank)
    assert swapped.tolist() == [[0.0, 10.0], [1.0, 11.0]][world.rank]
    dist.broadcast(swapped, src=1)
    assert swapped.tolist() == [1.0, 11.0]
    sent, received = torch.full((3,), float(world.rank), device=device), torch.empty(3, device=device)
    for request in [dist.isend(sent, 1 - world.rank), dist.irecv(received, 1 - world.rank)]:
        request.wait()
    assert received.tolist() == [1.0 - world.rank] * 3
    dist.barrier(device_ids=[world.rank])
    dist.all_reduce(cpu := torch.ones(1))
    assert cpu.item() == 2


def test_collectives_run_on_a_stream_of_their_own(sim_ranks):
    sim_ranks(2)(collectives)


def wrapped(world):
    device = torch.device("sim", world.rank)
    torch.sim.set_device(device)
    torch.manual_seed(7)
    oracle = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model.load_state_dict(oracle.state_dict())
    model = nn.parallel.DistributedDataParallel(model.to(device), device_ids=[world.rank], bucket_cap_mb=0.0003)
    batch = torch.randn(8, 6)
    for _ in range(3):
        for each in (model, oracle):
            each.zero_grad()
        with torch.sim.counting() as counts:
            mine = batch.chunk(2)[world.rank].pin_memory().to(device, non_blocking=True)
            model(mine).square().mean().backward()
        oracle(batch).square().mean().backward()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            assert torch.allclose(ours.grad.cpu(), theirs.grad, atol=1e-6)
    assert counts.synchronizations == 0, counts.places


def test_the_class_of_torch_runs_and_never_waits_on_the_host(sim_ranks):
    sim_ranks(2)(wrapped)


# --- It finds what is not in order


def found(faulty):
    """Return the text of the error that ``faulty`` ends with."""
    with pytest.raises(RuntimeError) as caught:
        faulty()
    torch.sim.synchronize()
    assert torch.sim.take_errors()[:1] in ([str(caught.value)], []), "an error of order is also kept"
    return str(caught.value)


def bucket_without_wait(world, waits):
    device = torch.device("sim", world.rank)
    torch.sim.set_device(device)
    gradient = torch.ones(4, device=device)

    def reduce():
        bucket = torch.cat([gradient, gradient])
        work = dist.all_reduce(bucket, async_op=True)
        if waits:
            work.wait()
        return gradient.copy_(bucket[:4])

    if waits:
        return reduce().tolist()
    return found(reduce)


def test_a_missing_wait_before_a_bucket_is_read_is_found(sim_ranks):
    assert sim_ranks(2)(bucket_without_wait, True) == [[2.0] * 4] * 2
    for text in sim_ranks(2)(bucket_without_wait, False):
        assert text.startswith("simulated device: two streams touch a tensor with no event between them.\n  before: ")
        assert "writes 'output' of simccl ALLREDUCE at " in text and "reads 'src' of aten::copy_ at " in text
        assert "a float tensor of shape [4] on sim:" in text and "allocated by an allocation at " in text
        assert text.count("test_simulated_device.py") >= 3


def side_stream(world, records):
    """A batch made on one stream and used on another is freed, and its memory given away, while that one works."""
    side, main = torch.Stream("sim"), torch.accelerator.current_stream()

    def step():
        with side:
            batch = torch.ones(64, device="sim")
        main.wait_stream(side)
        total = batch * 2
        if records:
            batch.record_stream(main)
        del batch
        with side:
            torch.zeros(64, device="sim")
        return total

    return step().sum().item() if records else found(step)


def test_a_missing_record_stream_is_found(sim_ranks):
    assert sim_ranks(1)(side_stream, True) == [128.0]
    (text,) = sim_ranks(1)(side_stream, False)
    assert "while another stream works on it: record_stream() is missing." in text
    assert "the default stream of sim:0 reads 'self' of aten::mul at " in text
    assert "freed by a release at " in text and "allocated by an allocation at " in text


def read_at_once(world, synchronizes, read):
    source = torch.arange(3.0, device="sim")
    event = torch.Event("sim")
    there = source.to("cpu", non_blocking=True)
    assert there.is_pinned()
    event.record()
    if synchronizes:
        event.synchronize()
        return read(there)
    text = found(lambda: read(there))
    torch.sim.synchronize()
    assert read(there) == [0.0, 1.0, 2.0]
    return text


@pytest.mark.parametrize("read", [lambda t: t.tolist(), lambda t: t.numpy().tolist(), lambda t: [x.item() for x in t]])
def test_a_host_read_without_synchronize_is_found(sim_ranks, read):
    assert sim_ranks(1)(read_at_once, True, read) == [[0.0, 1.0, 2.0]]
    (text,) = sim_ranks(1)(read_at_once, False, read)
    assert "the host touches memory that a stream may still work on: a synchronization is missing." in text
    assert "writes 'self' of aten::copy_ at " in text and "block " in text and " of pinned memory, " in text


def two_devices(world):
    weight, batch = torch.ones(2, 2, device="sim:0"), torch.ones(2, 2, device="sim:1")
    text = found(lambda: weight @ batch)
    assert "argument 'mat2' of aten::mm is on sim:1 and another is on sim:0" in text
    assert "is on cpu and another is on sim:0" in found(lambda: weight @ torch.ones(2, 2))
    assert (weight @ batch.to("sim:0")).tolist() == [[2.0, 2.0]] * 2


def test_a_tensor_on_the_wrong_device_is_found(sim_ranks):
    sim_ranks(1)(two_devices)


def wrong_stream(world, right):
    side, main = torch.Stream("sim"), torch.accelerator.current_stream()
    source = torch.ones(8, device="sim")

    def step():
        side.wait_stream(main)
        with side:
            doubled = source * 2
        event = torch.Event("sim")
        event.record(side if right else torch.Stream("sim"))
        main.wait_event(event)
        return doubled + 1

    return step().sum().item() if right else found(step)


def test_an_event_recorded_on_the_wrong_stream_is_found(sim_ranks):
    assert sim_ranks(1)(wrong_stream, True) == [24.0]
    (text,) = sim_ranks(1)(wrong_stream, False)
    assert "of sim:0 writes 'out' of aten::mul at " in text and "reads 'self' of aten::add at " in text
    assert "the default stream of sim:0 last waited for stream " in text


def freed(world):
    tensor = torch.ones(4, device="sim")
    tensor.untyped_storage().resize_(0)
    return found(lambda: tensor + 1)


def test_the_use_of_freed_memory_is_found(sim_ranks):
    (text,) = sim_ranks(1)(freed)
    assert "uses memory that was freed" in text


def touch(world):
    """Read a device's memory by its address, in a fork, and return what that wrote before it died."""
    tensor = torch.ones(4, device="sim")
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
        child = os.fork()
    if child == 0:
        os.dup2(write_end, 2)
        faulthandler.enable()
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as written:
        text = written.read()
    return text, os.WTERMSIG(os.waitpid(child, 0)[1])


def test_the_host_cannot_reach_the_memory_of_a_device(sim_ranks):
    ((text, signal_number),) = sim_ranks(1)(touch)
    assert signal_number == signal.SIGSEGV
    assert " in string_at" in text and " in touch" in text


# --- The same faults, planted in Lockstep


def on_another_stream(device, *, timing=False):
    event = torch.Event(device, enable_timing=timing)
    event.record(torch.Stream(device))
    return event


def on_another_device(tensor, device):
    return tensor.to(torch.device("sim", device.index + 2))


FAULTS = {
    "none": None,
    "record_stream": (loader, "_record", lambda tensor, stream: tensor),
    "wait": (comm_hooks.AllReduceMean, "finish", lambda self, bucket, future: None),
    "synchronize": (accelerator.HostCopy, "read", lambda copy: copy.value),
    "device": (loader, "_put_on_device", on_another_device),
    "event": (accelerator, "recorded_event", on_another_stream),
}
TEXTS = {
    "record_stream": ("record_stream() is missing", "the default stream of sim:", "data/loader.py"),
    "wait": ("no event between them", "writes 'output' of simccl ALLREDUCE at ", "parallel/ddp/comm_hooks.py"),
    "synchronize": ("a synchronization is missing", "writes 'self' of aten::copy_ at ", "lockstep/base/accelerator.py"),
    "device": ("Expected all tensors to be on the same device", "'mat1' of aten::addmm is on sim:"),
    "event": ("a synchronization is missing", "writes 'self' of aten::copy_ at ", "lockstep/base/accelerator.py"),
}


def train_with(world, fault):
    """Train with a fault; without synchronisation where that hides it.

    In a step that checks its gradient the host waits for it before the next batch is copied, so the memory of the last
    one is free by then. Steps without synchronisation, which measure what communication costs, wait for nothing.
    """
    patch = mock.patch.object(*FAULTS[fault]) if FAULTS[fault] else contextlib.nullcontext()
    loop = Trainer(make_task(), Settings(accumulate=2), world, strategy="ddp", devices=[world.device])

    def steps():
        for _ in range(4):
            last = loop.step()
        return float(last.loss)

    with patch, loop.without_sync() if fault == "record_stream" else contextlib.nullcontext():
        return found(steps) if FAULTS[fault] else steps()


def unsynchronized(world):
    loop = Trainer(make_task(), Settings(accumulate=2), world, strategy="ddp", devices=[world.device])
    with loop.without_sync():
        for _ in range(4):
            loop.step()


def test_training_has_none_of_these_faults(sim_ranks):
    expected = whole_batch(make_task(), 4, accumulate=2)["losses"][-1]
    assert sim_ranks(2)(train_with, "none") == pytest.approx([expected] * 2, rel=1e-12)
    sim_ranks(2)(unsynchronized)


@pytest.mark.parametrize("fault", TEXTS)
def test_a_fault_in_the_engine_or_the_loop_is_found(sim_ranks, fault):
    for text in sim_ranks(2)(train_with, fault):
        for part in TEXTS[fault]:
            assert part in text
