"""Both engines on several simulated accelerators: the gradients of one process on the CPU, in order."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import lockstep
from tests.batchnorm import errors_of_steps
from tests.distributed.test_zero_parity import bare, make, net
from tests.distributed.test_zero_parity import batch as batch_of_step
from tests.models import FAMILIES, build, global_batch, relative_error, share, soak

TOLERANCE = 1e-11
# Without those that torch itself cannot run on a device without kernels of its own (group norm in channels last).
MOST = sorted(set(FAMILIES) - {"structured", "sparse", "channels_last"})


def on(device, tensors):
    return tuple(tensor.to(device) for tensor in tensors)


def module_on(device, module):
    """Move a module as it is: torch ties shared weights again for the devices that it knows, not for PrivateUse1."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def assert_gradients_equal(model, oracle, tolerance=TOLERANCE):
    for (name, parameter), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None:
            assert relative_error(parameter.grad.cpu(), expected.grad) < tolerance, name


# --- DataParallel: one process, a replica on each device


def forward_and_backward(world, names, devices):
    for name in names:
        oracle, family = build(name), FAMILIES[name]
        model = lockstep.DataParallel(module_on("sim:0", build(name)), devices)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, oracle)]
        for step in range(3):
            batch = global_batch(name, 8, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            family.loss(model, on("sim:0", batch)).backward()
            family.loss(oracle, batch).backward()
            assert_gradients_equal(model.module, oracle)
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("devices", [[0, 1], [2, 3], *soak([[0, 0, 1, 1], None])])
def test_data_parallel_gives_the_gradients_of_one_process(on_sim, devices):
    if devices == [2, 3]:  # not the device that is current
        on_sim(1, several_devices=True)(module_elsewhere, devices)
    else:
        on_sim(1, several_devices=True)(forward_and_backward, ["mlp", "cnn", "transformer", "reused"], devices)


def module_elsewhere(world, devices):
    oracle, inputs = build("mlp"), global_batch("mlp", 6, 0)
    model = lockstep.DataParallel(module_on("sim:2", build("mlp")), devices)
    outputs = model(inputs[0].pin_memory())
    assert outputs.device == torch.device("sim", 2) and torch.accelerator.current_device_index() == 0
    outputs.square().sum().backward()
    oracle(inputs[0]).square().sum().backward()
    assert_gradients_equal(model.module, oracle)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_data_parallel_backward_computes_the_loss_in_the_replicas(on_sim, num_devices):
    names = ["mlp", "cnn", "reused"]
    if torch.__version__ >= (2, 12):  # before, a checkpointed backward on this device fails without Lockstep, too
        names.append("checkpoint")
    on_sim(1, several_devices=True)(backward_in_replicas, names, num_devices)


def backward_in_replicas(world, names, num_devices):
    for name in names:
        oracle, family = build(name), FAMILIES[name]
        model = lockstep.DataParallel(module_on("sim:0", build(name)), list(range(num_devices)))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, oracle)]
        for step in range(3):
            batch = global_batch(name, 2 * num_devices, step)
            shards = [on(device, share(batch, i, num_devices)) for i, device in enumerate(model.devices)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = model.backward(family.loss, shards, [1 / num_devices] * num_devices)
            assert [loss.device for loss in losses] == list(model.devices)
            family.loss(oracle, batch).backward()
            assert_gradients_equal(model.module, oracle)
            for optimizer in optimizers:
                optimizer.step()


def test_data_parallel_stays_on_the_streams_of_the_caller(on_sim):
    on_sim(1, several_devices=True)(on_streams_of_the_caller)


def on_streams_of_the_caller(world):
    """Also when these are the current streams of their devices already, where entering one changes no device."""
    seen = {}

    class Net(nn.Linear):
        def forward(self, x):
            seen[x.device] = torch.accelerator.current_stream(), torch.accelerator.current_device_index()
            return super().forward(x)

    streams = [torch.Stream("sim:0"), torch.Stream("sim:1")]
    with contextlib.ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(stream)
        torch.accelerator.current_stream(0).synchronize()
        module = Net(8, 8).to("sim:0")
        model = lockstep.DataParallel(module, [0, 1])
        with torch.autocast("sim", dtype=torch.bfloat16):
            outputs = model(torch.randn(4, 8, device="sim:0"))
        assert outputs.dtype is torch.bfloat16
        outputs.float().sum().backward()
        assert module.weight.grad.cpu().isfinite().all()
    assert seen == {stream.device: (stream, index) for index, stream in enumerate(streams)}
    model(torch.randn(4, 8, device="sim:0"))
    current = [torch.accelerator.current_stream(index) for index in range(2)]
    assert seen == {stream.device: (stream, index) for index, stream in enumerate(current)}


# --- DistributedDataParallel: a process for each device


def train_beside_oracle(world, names, options, hook=None, tolerance=TOLERANCE):
    for name in names:
        family, oracle = FAMILIES[name], build(name)
        wrapped = module_on(world.device, build(name, seed=world.rank))
        model = lockstep.DistributedDataParallel(wrapped, **{"bucket_cap_mb": 0.0005, **options})
        if hook is not None:
            model.register_comm_hook(*HOOKS[hook](world))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle)]
        for step in range(4):
            batch = global_batch(name, 2 * world.world_size, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            family.loss(model, on(world.device, share(batch, world.rank, world.world_size))).backward()
            family.loss(oracle, batch).backward()
            assert_gradients_equal(wrapped, oracle, tolerance)
            for parameter, expected in zip(wrapped.parameters(), oracle.parameters(), strict=True):
                if expected.grad is not None:
                    expected.grad = parameter.grad.cpu().to(expected.dtype)  # what was rounded does not add up
            for optimizer in optimizers:
                optimizer.step()


HOOKS = {
    "all-reduce": lambda world: (world.group, default_hooks.allreduce_hook),
    "fp16": lambda world: (world.group, default_hooks.fp16_compress_hook),
    "bf16": lambda world: (world.group, default_hooks.bf16_compress_hook),
    "powersgd": lambda world: (
        powerSGD_hook.PowerSGDState(world.group, matrix_approximation_rank=1, start_powerSGD_iter=100),
        powerSGD_hook.powerSGD_hook,
    ),
}


@pytest.mark.parametrize(("num_ranks", "names"), [(2, ["mlp", "transformer", "reused"]), *soak([(4, MOST)])])
def test_ddp_gives_the_gradients_of_one_process(on_sim, num_ranks, names):
    on_sim(num_ranks)(train_beside_oracle, names, {})


@pytest.mark.parametrize("num_ranks", [2, *soak([1, 3, 4])])
def test_ddp_with_communication_hooks(on_sim, num_ranks):
    def run(world):
        for hook in HOOKS:
            exact = hook in ("all-reduce", "powersgd")
            train_beside_oracle(world, ["mlp"], {}, hook, TOLERANCE if exact else 0.05)

    on_sim(num_ranks)(run)


@pytest.mark.parametrize("compression", ["int8", *soak(["bf16", "powersgd:2"])])
def test_ddp_with_compression(on_sim, compression):
    """What gets lost is in the residuals, so the sums over the steps are exact."""
    sims = on_sim(2)(compressed, compression)
    assert all(torch.equal(sim, sims[0]) for sim in sims)


def compressed(world, compression):
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Linear(300, 40).to(world.device), compression=compression)
    came = given = torch.zeros(40, 300)
    for step in range(5):
        model.zero_grad()
        batches = [torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        model(batches[world.rank].to(world.device)).sum().backward()
        came = came + model.module.weight.grad.cpu()
        given = given + sum(batch.sum(0) for batch in batches).expand(40, 300) / 2
    left = model.compression_state_dict()["residuals"]["weight"] if compression != "bf16" else torch.zeros(40, 300)
    both = [torch.zeros_like(left).to(world.device) for _ in range(2)]
    torch.distributed.all_gather(both, left.to(world.device))
    lost = sum(each.cpu() for each in both)
    assert torch.allclose(came + lost, given, atol=0.5 if compression == "bf16" else 1e-3, rtol=0)
    return came


@pytest.mark.parametrize("num_ranks", [2, *soak([4])])
def test_ddp_in_every_other_way(on_sim, num_ranks):
    """Weights, accumulation, uneven inputs, an optimizer in backward, buckets that are finished early."""

    def run(world):
        weighed(world)
        uneven(world)
        overlapped(world)

    on_sim(num_ranks)(run)


def weighed(world):
    """Ranks with batches of different sizes, in several micro-batches; in some steps no rank gives a weight."""
    oracle = build("mlp")
    model = lockstep.DistributedDataParallel(module_on(world.device, build("mlp")), bucket_cap_mb=0.0005)
    for step in range(5):
        model.zero_grad()
        oracle.zero_grad()
        sizes = [1 + (rank + step) % 3 for rank in range(world.world_size)]
        batch = global_batch("mlp", 2 * sum(sizes), step)
        mine = [part.split([n for size in sizes for n in (size, size)])[2 * world.rank :][:2] for part in batch]
        for index in range(2):
            with model.no_sync() if index == 0 else contextlib.nullcontext():
                model.mean_over(sizes[world.rank])
                FAMILIES["mlp"].loss(model, on(world.device, [part[index] for part in mine])).backward()
        FAMILIES["mlp"].loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)


def uneven(world):
    """Ranks that run out of batches one after the other."""
    model = lockstep.DistributedDataParallel(module_on(world.device, build("mlp")), bucket_cap_mb=0.0005)
    with model.join():
        for step in range(3 + world.rank):
            model.zero_grad()
            batch = global_batch("mlp", 4 * world.world_size, step)
            FAMILIES["mlp"].loss(model, on(world.device, share(batch, world.rank, world.world_size))).backward()
    states = [torch.zeros((), dtype=torch.float64, device=world.device) for _ in range(world.world_size)]
    torch.distributed.all_gather(states, sum(each.detach().sum() for each in model.parameters()))
    assert len({float(each) for each in states}) == 1


def overlapped(world):
    oracle = build("mlp")
    model = lockstep.DistributedDataParallel(module_on(world.device, build("mlp")), bucket_cap_mb=0.0005)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, oracle)]
    model.overlap_optimizer(optimizers[0])
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = global_batch("mlp", 4 * world.world_size, step)
        FAMILIES["mlp"].loss(model, on(world.device, share(batch, world.rank, world.world_size))).backward()
        FAMILIES["mlp"].loss(oracle, batch).backward()
        optimizers[1].step()
        for (name, found), expected in zip(model.module.named_parameters(), oracle.parameters(), strict=True):
            assert relative_error(found.detach().cpu(), expected.detach()) < TOLERANCE, (step, name)


@pytest.mark.parametrize("num_ranks", [2, *soak([1, 3, 4])])
def test_a_divided_optimizer_does_what_the_bare_one_does(on_sim, num_ranks):
    on_sim(num_ranks)(divided)


def divided(world):
    for shard_gradients in (False, True):
        model = module_on(world.device, net())
        settings = {"shard_gradients": shard_gradients}
        wrapped, optimizer = make(world, torch.optim.AdamW, model, **settings, lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = on(world.device, share(batch_of_step(step), world.rank, world.world_size))
            (wrapped(inputs, step % 2) - targets).square().mean().backward()
            optimizer.step()
        expected, _ = bare(torch.optim.AdamW, 4, clip=None, lr=0.01)
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert relative_error(found.detach().cpu(), wanted.detach()) < TOLERANCE


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, [0, 5]), *soak([(2, [4, 3]), (4, [3, 1, 0, 2])])])
def test_synchronised_batch_norm(on_sim, num_ranks, sizes):
    def run(world):
        return [errors_of_steps(world, sizes, shape, device=str(world.device)) for shape in [(4,), (4, 3, 3)]]

    for errors in on_sim(num_ranks)(run):
        assert all(max(each.values()) < 1e-12 for each in errors)
