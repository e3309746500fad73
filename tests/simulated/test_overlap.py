"""What the engines put on streams, and in which order: parameters that arrive late, one tail, copies from a device."""

import copy
import sys
from collections import defaultdict, deque
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.base import accelerator
from lockstep.comm.collectives import all_gather, broadcast_coalesced
from lockstep.parallel.dp import replicas
from lockstep.parallel.dp.replicas import coalesced_copies
from lockstep.parallel.zero import partition
from lockstep.parallel.zero.optimizer import shard_optimizer
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task

WIDTH = 16
# A bucket for each parameter of this width.
CAP_MB = 0.00005
LAST = torch.channels_last


def layers(count=4, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, **options) for _ in range(count)))


def inputs(world, step=0):
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    return torch.randn(3, WIDTH, generator=generator).to(world.device)


class Operations(TorchDispatchMode):
    """Records the name and the tensors of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.__name__.split(".")[0], args, result))
        return result


# --- ZeRO: parameters that are waited for when they are used


def train(world, model, loss_of, *, late, num_steps=3):
    """Train with ZeRO-1, with waits in the forward or before; return the parameters."""
    wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), group=world.group)
    optimizer.overlaps = True
    for step in range(num_steps):
        optimizer.zero_grad()
        if not late:
            optimizer.wait()
        with optimizer.wait_late():
            loss = loss_of(wrapped, inputs(world, step))
        assert {type(each) for each in model.parameters()} <= {nn.Parameter, OwnParameter}
        loss.backward()
        optimizer.step()
    optimizer.wait()
    assert not partition._arrivals
    return torch.cat([each.detach().flatten().cpu() for each in model.parameters()])


class Uses(nn.Module):
    """Uses the parameters of some of its layers without calling them."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body = how, layers()
        if how == "attention":
            self.attention = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)

    def forward(self, x):
        used = self.body[2].weight
        x = self.body[0](x)
        if self.how == "functional":
            x = F.linear(x, used, self.body[2].bias)
        elif self.how == "list":
            x = x + torch._foreach_norm([used])[0]
        elif self.how == "data":
            x = x + used.data.sum() + used.detach().T.sum()
        elif self.how == "function":
            x = Multiply.apply(x, used)
        elif self.how == "copied":
            copied = copy.deepcopy(self.body[2])
            x = x + copied(x).detach()
            assert type(copied.weight) is nn.Parameter
        elif self.how == "functional_call":
            x = torch.func.functional_call(self.body[1], dict(self.body[2].named_parameters()), x)
        elif self.how == "side stream":
            main, side = torch.accelerator.current_stream(), torch.Stream(x.device)
            side.wait_stream(main)
            y = self.body[1](x)
            with side:
                z = self.body[1](x)
            main.wait_stream(side)
            x = y + z
        elif self.how == "attention":
            x = self.attention(x.unsqueeze(1)).squeeze(1)
        elif self.how == "checkpoint":
            x = torch.utils.checkpoint.checkpoint(self.body[1], x, use_reentrant=False)
        return self.body[3](self.body[2](self.body[1](x)))


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def penalised(model, x):
    """A penalty on the weights that is computed first, with a list that the loss keeps."""
    return sum(each.square().sum() for each in model.module.parameters()) + model(x).square().mean()


def used_outside_of_their_layers(world, hows):
    for how in hows:
        loss = penalised if how == "penalty" else lambda model, x: model(x).square().mean()
        late, at_once = (train(world, Uses(how).to(world.device), loss, late=each) for each in (True, False))
        assert torch.equal(late, at_once), how


EVERY_USE = ["functional", "list", "data", "function", "copied", "functional_call", "side stream", "attention"]


@pytest.mark.parametrize("hows", [EVERY_USE[:3], EVERY_USE[3:6], [*EVERY_USE[6:], "checkpoint", "penalty"]])
def test_parameters_have_arrived_wherever_they_are_used(on_sim, hows):
    """A read without a wait is an error of the simulated device, which compares what orders the streams."""
    on_sim(2)(used_outside_of_their_layers, hows)


def in_order(world, kind="plain"):
    model, log = layers().to(world.device), []
    wait = partition.wait_for_gather
    if kind == "a class of its own":
        model[3].bias = OwnParameter(model[3].bias.detach())
    if kind == "compiled":
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    else:
        forget_compiled()
    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, number=number: log.append(number))

    def logged(works):
        log.append("wait")
        wait(works)

    partition.wait_for_gather = logged
    try:

        def loss_of(wrapped, x):
            log[:] = [*log[-1:], "forward"] if log[-1:] == ["wait"] else ["forward"]
            loss = wrapped(x).square().mean()
            log.append("end")
            return loss

        train(world, model, loss_of, late=True)
    finally:
        partition.wait_for_gather = wait
        forget_compiled()
    return [each for each, _ in groupby(log)]


class OwnParameter(nn.Parameter):
    pass


def forget_compiled():
    """Forget what tests in this process have compiled before."""
    if (compiler := sys.modules.get("torch._dynamo.utils")) is not None:
        compiler.counters.clear()


def test_each_layer_waits_for_its_own_parameters(on_sim):
    expected = ["forward", "wait", 0, "wait", 1, "wait", 2, "wait", 3, "end", "wait"]
    assert on_sim(2)(in_order) == [expected] * 2


@pytest.mark.parametrize("kind", ["compiled", "a class of its own"])
def test_the_forward_waits_for_all_where_the_class_of_a_parameter_counts(on_sim, kind):
    """Compiled code checks it in each call, and another class may have operations of its own."""
    assert on_sim(2)(in_order, kind) == [["wait", "forward", 0, 1, 2, 3, "end", "wait"]] * 2


def test_in_fit_too(on_sim):
    """Two buckets: of the first layer, and of the others. The log of a step begins with its update."""

    def run(world):
        log = []
        original = partition.wait_for_gather

        def model():
            torch.manual_seed(0)
            made = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 400), nn.Linear(400, 4)).double()
            for number, layer in enumerate(made):
                layer.register_forward_hook(lambda *_, number=number: log.append(number))
            return made

        def logged(works):
            log.append("wait")
            original(works)

        forget_compiled()
        loop = Trainer(make_task(model=model), Settings(epochs=2), world, strategy="ddp-zero1", devices=[world.device])
        partition.wait_for_gather = logged
        try:
            for _ in range(3):  # after the first the parameters are compared, which waits, too
                log.clear()
                loop.step()
        finally:
            partition.wait_for_gather = original
        loop.close()
        return [each for each, _ in groupby(log)]

    assert on_sim(2)(run) == [["wait", 0, "wait", 1, 2]] * 2


# --- ZeRO: one collective for the tails of all buckets


def collectives_of_a_step(world, shard_gradients):
    model = layers().to(world.device)
    wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    optimizer = lockstep.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=shard_gradients, lr=0.1
    )
    for step in range(3):
        optimizer.zero_grad()
        with torch.sim.counting() as backward:
            wrapped(inputs(world, step)).sum().backward()
        with torch.sim.counting() as update:
            optimizer.step()
    return backward.collectives, update.collectives


@pytest.mark.parametrize(("shard_gradients", "expected"), [(True, (8 + 1, 8)), (False, (8, 1))])
def test_tails_are_reduced_together_and_nothing_remains_to_be_sent_beside_the_slices(on_sim, shard_gradients, expected):
    """Eight buckets; without slices of gradients, the parameters lie in one buffer."""
    assert on_sim(2)(collectives_of_a_step, shard_gradients) == [expected] * 2


# --- DataParallel: devices pass on the weights


def copies_of_weights(world, num_devices):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).double(), nn.Conv2d(1, 8, 3).to(memory_format=LAST))
    module = module.to("sim:0")
    devices = [torch.device("sim", index) for index in range(num_devices)]
    with Operations() as seen:
        rows = coalesced_copies(list(module.parameters()), devices[1:])
    for row, device in zip(rows, devices[1:], strict=True):
        for found, expected in zip(row, module.parameters(), strict=True):
            assert (found.device, found.stride()) == (device, expected.stride())
            assert torch.equal(found.cpu(), expected.detach().cpu())
    copies = [(args[0], result) for name, args, result in seen.calls if name == "_to_copy"]
    return [(source.dtype, source.device.index, target.device.index) for source, target in copies]


def test_devices_that_have_the_weights_pass_them_on(on_sim):
    (copies,) = on_sim(1, several_devices=True)(copies_of_weights, 4)
    route = [(0, 1), (0, 2), (1, 3)]
    assert copies == [(dtype, *hop) for dtype in (torch.float32, torch.float64) for hop in route]


def chunks_of_weights(world):
    """Tensors of a third of a chunk, and a larger one: nothing packs all of them."""
    third = replicas._CHUNK_BYTES // 12 + 1
    tensors = [
        torch.full((size,), float(place), device="sim:0") for place, size in enumerate([third] * 4 + [5 * third])
    ]
    with Operations() as seen:
        ((*small, large),) = coalesced_copies(tensors, [torch.device("sim:1")])
    assert [float(each[-1]) for each in (*small, large)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    return [result.numel() / third for name, _, result in seen.calls if name == "cat"]


def test_weights_are_packed_in_chunks(on_sim):
    assert on_sim(1, several_devices=True)(chunks_of_weights) == [[2.0, 2.0]]


# --- SyncBatchNorm, and buffers of several dtypes


def kernels_of_a_gather(world):
    vector = torch.full((5,), 1.0 + world.rank, device=world.device)
    all_gather(vector, group=world.group)
    with torch.sim.counting() as counts:
        rows = all_gather(vector, group=world.group)
    assert rows.tolist() == [[1.0 + rank] * 5 for rank in range(world.world_size)]
    layer = lockstep.SyncBatchNorm(4).to(world.device)
    layer(torch.randn(3, 4, device=world.device))
    with torch.sim.counting() as forward:
        layer(torch.randn(3, 4, device=world.device))
    return (counts.kernels, counts.collectives), forward.kernels


def test_statistics_are_gathered_without_a_kernel_for_each_rank(on_sim):
    two, three = on_sim(2)(kernels_of_a_gather), on_sim(3)(kernels_of_a_gather)
    assert {costs for costs, _ in two} == {costs for costs, _ in three}
    assert {kernels for _, kernels in two} == {kernels for _, kernels in three}


def calls_of_a_broadcast(world):
    kinds = [torch.float32, torch.int64, torch.float32, torch.int64, torch.bfloat16]
    tensors = [torch.full((3,), 1 + world.rank, dtype=dtype, device=world.device) for dtype in kinds]
    tensors.append(torch.full((2, 3, 4, 4), 1.0 + world.rank, device=world.device).to(memory_format=LAST))
    with Operations() as seen:
        broadcast_coalesced(tensors, group=world.group)
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    calls = [args for name, args, _ in seen.calls if name == "_foreach_copy_"]
    return [[(each.dtype, each.is_contiguous()) for each in (*targets, *sources)] for targets, sources in calls]


def test_tensors_are_packed_with_one_copy_for_each_dtype(on_sim):
    """A copy of several dtypes in one call is a kernel for each tensor."""
    for calls in on_sim(2)(calls_of_a_broadcast):
        assert [len(call) // 2 for call in calls] == [2, 2, 1, 1]
        assert all(len({dtype for dtype, _ in call}) == 1 for call in calls)
        assert [len(set(call)) for call in calls] == [1, 1, 2, 1]  # of the tensor in channels_last


# --- compression: its threads use the device of the rank, and the host waits only for what it sends


def waits_of_compression(world):
    model = layers().to(world.device)
    wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, compression="int8")
    for step in range(3):
        model.zero_grad()
        loss = wrapped(inputs(world, step)).square().mean()
        with torch.sim.counting() as counts:
            loss.backward()
    threads = {each.thread for each in counts.waits}
    return counts.synchronizations, len(counts.waits), threads


def test_compression_waits_once_for_each_bucket_and_in_its_own_thread(on_sim):
    """That no thread opens a context on another device is checked by the fixture, in each test here."""
    for synchronizations, num_waits, threads in on_sim(2)(waits_of_compression):
        assert synchronizations == 0
        assert num_waits <= 8
        assert threads <= {"lockstep-compression"}


def finish_on_another_stream(world):
    """Finish a bucket beside backward, as `fit` does, before another of the same size is sent."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(3))).to(world.device)
    wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.001, compression="int8")
    for _ in range(2):
        wrapped(torch.ones(2, 32, device=world.device)).sum().backward()
    reduction, buckets = wrapped.reducer.reduction, wrapped.reducer.bucket_set.buckets
    assert len({bucket.payload.shape for bucket in buckets}) == 1
    beside = torch.Stream(world.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "_pools", defaultdict(deque))  # without what the steps above have left
        for bucket in buckets:
            future = reduction.start(bucket, alone=False)
            future.wait()
            with beside:
                reduction.finish(bucket, future)
        kept = [each for pool in accelerator._pools.values() for each in pool if isinstance(each, torch.Tensor)]
    assert not kept
    torch.accelerator.current_stream(world.device).wait_stream(beside)


def test_memory_of_the_host_is_not_written_while_a_bucket_is_copied_back_from_it(on_sim):
    """Nor is it kept: torch's allocator has it again when the copy is over."""
    on_sim(2)(finish_on_another_stream)
