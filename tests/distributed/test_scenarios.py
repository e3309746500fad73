"""What the engines must do on ranks of any device: `SCENARIOS`, each a function of a world that asserts by itself.

The same functions run on CPU ranks here, on the simulated device in tests/simulated, and over NCCL in tests/gpu. They
work with any number of ranks. A rank that is alone reduces its buckets all the same, as far as that can be asked for.
"""

import contextlib
import copy
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.base.accelerator import move
from lockstep.errors import JobHangs, RankFailed
from lockstep.launcher.api import launch_with
from lockstep.launcher.output import LogSettings
from lockstep.parallel.ddp.comm_hooks import AllReduceMean
from tests.batchnorm import errors_of_steps
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, relative_error, share, soak
from tests.training import make_task, samples

NUM_STEPS = 3
PER_RANK = 4
NUM_STEPS_OF_BF16 = 100
NUM_WARM_UP = 11
"""As torch asks for, before a wrapper's step is captured."""
World = Any


def on(device: torch.device, tensors: tuple[Tensor, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return copies there, those of floating numbers in ``dtype``."""
    return tuple(part.to(device, dtype if part.is_floating_point() else part.dtype) for part in tensors)


def flat(tensors: Any) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


def wrap(world: World, module: nn.Module, **options: Any) -> lockstep.DistributedDataParallel:
    """Return the engine; with small buckets, so that there are several."""
    model = lockstep.DistributedDataParallel(module, **{"bucket_cap_mb": 0.0005, **options})
    if world.world_size == 1 and "compression" not in options:
        model.reducer.set_reduction(AllReduceMean(model.process_group))
    return model


def assert_same_bits(world: World, tensor: Tensor) -> None:
    """Check that all ranks hold the same. Collective: every rank."""
    gathered = [torch.empty_like(tensor) for _ in range(world.world_size)]
    dist.all_gather(gathered, tensor.contiguous(), group=world.group)
    for rank, other in enumerate(gathered):
        assert torch.equal(other, tensor), f"rank {world.rank} and rank {rank} differ"


# --- against torch's class -------------------------------------------------------------------------------------------


def train(
    world: World, model: nn.Module, name: str, *, dtype: torch.dtype, autocast: torch.dtype | None, num_micro: int
) -> tuple[list[Tensor | None], Tensor]:
    """Train either class in a loop of the usual kind; return the last gradients and the weights."""
    family, device = FAMILIES[name], world.device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=autocast is torch.float16)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for micro in range(num_micro):
            batch = global_batch(name, PER_RANK * world.world_size, seed=10 * step + micro)
            part = on(device, share(batch, world.rank, world.world_size), dtype)
            with contextlib.ExitStack() as stack:
                if micro < num_micro - 1:
                    stack.enter_context(model.no_sync())
                if autocast is not None:
                    stack.enter_context(torch.autocast(device.type, dtype=autocast))
                loss = family.loss(model, part)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
    return gradients, flat(model.parameters())


def against_torch(
    world: World,
    name: str,
    *,
    tolerance: float = 1e-12,
    dtype: torch.dtype = torch.float64,
    autocast: torch.dtype | None = None,
    num_micro: int = 1,
) -> None:
    """Both classes give the same gradients and weights; ours all ranks the same bits, and no gradient where none is."""
    modules = [move(build(name).to(dtype), world.device) for _ in range(2)]
    how: dict[str, Any] = {"dtype": dtype, "autocast": autocast, "num_micro": num_micro}
    gradients, weights = train(world, wrap(world, modules[0]), name, **how)
    theirs = TorchDDP(
        modules[1],
        device_ids=None if world.device.type == "cpu" else [world.device.index],
        find_unused_parameters=name == "reused",
    )
    expected, expected_weights = train(world, theirs, name, **how)
    for (parameter, _), mine, other in zip(modules[0].named_parameters(), gradients, expected, strict=True):
        if name == "reused" and parameter.startswith("unused"):
            assert mine is None, parameter
        else:
            assert mine is not None and other is not None, parameter
            assert relative_error(mine.double(), other.double()) < tolerance, parameter
    assert relative_error(weights.double(), expected_weights.double()) < tolerance
    assert_same_bits(world, weights)


def in_bf16(world: World, *, weights: torch.dtype, autocast: bool, tolerance: float) -> None:
    """Over many steps the loss falls as with torch's class; a rank that is alone has the same bits, as without either.

    ``tolerance`` is relative, of each loss; two classes may round other sums of the same gradients.
    """
    device = world.device
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 10))
    data = torch.randn(4, 8 * world.world_size, 32), torch.randint(10, (4, 8 * world.world_size))
    mine = on(device, tuple(part.chunk(world.world_size, 1)[world.rank] for part in data), weights)

    def losses(wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
        model = wrap(move(copy.deepcopy(first).to(weights), device))
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for step in range(NUM_STEPS_OF_BF16):
            optimizer.zero_grad()
            inputs, targets = (part[step % 4] for part in mine)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found).double().cpu()

    ours = losses(lambda module: wrap(world, module, bucket_cap_mb=25))
    theirs = losses(lambda module: TorchDDP(module, device_ids=None if device.type == "cpu" else [device.index]))
    assert ours[-4:].mean() < 0.5 * ours[:4].mean()
    assert torch.allclose(ours, theirs, rtol=tolerance, atol=0), (ours / theirs - 1).abs().max()
    if world.world_size == 1:
        assert torch.equal(ours, theirs) and torch.equal(ours, losses(lambda module: module))


# --- against one process on the whole batch --------------------------------------------------------------------------


def uneven(world: World, name: str) -> None:
    """Batches of other sizes on each rank and in each step, of which one may be empty, count by their samples."""
    family, device = FAMILIES[name], world.device
    oracle, model = move(build(name), device), wrap(world, move(build(name), device))
    for step in range(4):
        sizes = [[(rank + step) % 3, 1 + (rank + step) % 2] for rank in range(world.world_size)]
        in_order = [n for mine in sizes for n in mine]
        batch = on(device, global_batch(name, sum(in_order), seed=step))
        pieces = list(zip(*(part.split(in_order) for part in batch), strict=True))
        model.zero_grad()
        oracle.zero_grad()
        for index, n in enumerate(sizes[world.rank]):
            with contextlib.nullcontext() if index else model.no_sync():
                part = pieces[2 * world.rank + index] if n else tuple(tensor[:1] for tensor in batch)
                loss = family.loss(model, part) * (1.0 if n else float("nan"))
                lockstep.backward(loss, mean_over=torch.tensor(n, device=device))
        family.loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle, tolerance=1e-11)


def beside_oracle(world: World, name: str, steps_of: Callable[[nn.Module], Any], *, num_steps: int = 4) -> nn.Module:
    """Train with what ``steps_of(module)`` returns: a wrapped model and what follows a backward; return the oracle."""
    family, device = FAMILIES[name], world.device
    oracle, module = move(build(name), device), move(build(name), device)
    expected = torch.optim.AdamW(oracle.parameters(), lr=0.01)
    model, optimizer = steps_of(module)
    for step in range(num_steps):
        batch = global_batch(name, PER_RANK * world.world_size, seed=step)
        optimizer.zero_grad()
        if hasattr(optimizer, "wait"):
            optimizer.wait()
        family.loss(model, on(device, share(batch, world.rank, world.world_size))).backward()
        optimizer.step()
        expected.zero_grad()
        family.loss(oracle, on(device, batch)).backward()
        expected.step()
    if hasattr(optimizer, "wait"):
        optimizer.wait()
    weights = flat(module.parameters())
    assert relative_error(weights, flat(oracle.parameters())) < 1e-9
    assert_same_bits(world, weights)
    return oracle


def zero(world: World, name: str, *, shard_gradients: bool, overlaps: bool = False) -> None:
    """A sharded optimizer does what the bare one does, also where each rank is given its slice of the mean only."""

    def steps_of(module: nn.Module) -> Any:
        model = wrap(world, module)
        optimizer = lockstep.ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, lr=0.01, shard_gradients=shard_gradients
        )
        optimizer.overlaps = overlaps
        return model, optimizer

    beside_oracle(world, name, steps_of)


class NoStep:
    """Stands for an optimizer that steps in backward."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        pass


def optimizer_in_backward(world: World) -> None:
    def steps_of(module: nn.Module) -> Any:
        model = wrap(world, module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model.overlap_optimizer(optimizer)
        return model, NoStep(optimizer)

    beside_oracle(world, "mlp", steps_of)


def compressed(world: World, method: str) -> None:
    """All ranks get the same bits; what was lost in a step is rounding, or lies in the residuals and comes later."""
    torch.manual_seed(0)
    layer = move(nn.Linear(300, 40), world.device)
    model = lockstep.DistributedDataParallel(layer, compression=method)
    came, given = torch.zeros(40, 300, dtype=torch.float64), torch.zeros(40, 300, dtype=torch.float64)
    for step in range(6):
        model.zero_grad()
        inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(100 * step + world.rank))
        model(inputs.to(world.device)).sum().backward()
        came += layer.weight.grad.cpu()
        given += inputs.sum(0).expand(40, 300)
    assert_same_bits(world, layer.weight.grad)
    mean = given.to(world.device)
    residual = model.compression_state_dict()["residuals"].get("weight", torch.zeros(40, 300))
    left = residual.double().to(world.device)
    for total in (mean, left):
        dist.all_reduce(total, group=world.group)
    mean, left = mean.cpu() / world.world_size, left.cpu()
    rounding = {"bf16": 2**-6, "fp16": 2**-9}.get(method)
    if rounding is None:
        assert torch.allclose(came + left, mean, rtol=0, atol=1e-3)
        if world.world_size > 1:
            assert left.abs().max() > 0
    else:
        assert not left.any()
        assert (came - mean).abs().max() < rounding * 6 * given.abs().max()


def batch_norm(world: World) -> None:
    """Statistics and gradients are those of one process on the whole batch; some ranks may have no samples."""
    for sizes in ([4, 3] * world.world_size, [0, 5] * world.world_size):
        for shape in ((4,), (4, 3, 3)):
            mine = sizes[: world.world_size] if world.world_size > 1 else [5]
            errors = errors_of_steps(world, mine, shape, device=str(world.device), channels_last=len(shape) > 1)
            assert max(errors.values()) < 1e-11, errors


# --- graphs and compilers --------------------------------------------------------------------------------------------


def captured(world: World, name: str) -> None:
    """A whole step, captured in a CUDA graph, trains on like one process; without CUDA the step runs as it is."""
    family, device = FAMILIES[name], world.device
    oracle = move(build(name), device)
    has_graphs = device.type == "cuda"
    side = torch.cuda.Stream() if has_graphs else None
    with torch.cuda.stream(side) if has_graphs else contextlib.nullcontext():
        model = wrap(world, move(build(name), device), gradient_as_bucket_view=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, oracle)]

    def batches(seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        whole = global_batch(name, PER_RANK * world.world_size, seed)
        return on(device, share(whole, world.rank, world.world_size)), on(device, whole)

    def step(each: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> None:
        optimizer.zero_grad(set_to_none=True)
        family.loss(each, batch).backward()
        optimizer.step()

    static, whole = batches(0)
    for _ in range(NUM_WARM_UP):
        step(oracle, optimizers[1], whole)
    run = partial(step, model, optimizers[0], static)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side) if has_graphs else contextlib.nullcontext():
        for _ in range(NUM_WARM_UP):
            run()
    replay = run
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records, runs nothing
            run()
        replay = graph.replay
    for seed in range(1, 5):
        mine, whole = batches(seed)
        for place, value in zip(static, mine, strict=True):
            place.copy_(value)
        replay()
        step(oracle, optimizers[1], whole)
        assert relative_error(flat(model.parameters()), flat(oracle.parameters())) < 1e-10
    assert_same_bits(world, flat(model.parameters()))


def compiled(world: World, backend: str) -> None:
    """The wrapped module's forward is compiled; gradients are those of one process."""
    torch.compiler.reset()
    family, device = FAMILIES["mlp"], world.device
    oracle, module = move(build("mlp"), device), move(build("mlp"), device)
    model = torch.compile(wrap(world, module), backend=backend)
    for step in range(3):
        batch = global_batch("mlp", PER_RANK * world.world_size, step)
        module.zero_grad()
        oracle.zero_grad()
        family.loss(model, on(device, share(batch, world.rank, world.world_size))).backward()
        family.loss(oracle, on(device, batch)).backward()
        assert_gradients_equal(module, oracle, tolerance=1e-11)


# --- training: what a rank touches, and runs that end early ----------------------------------------------------------


def float32_samples() -> Any:
    return torch.utils.data.TensorDataset(*(part.float() for part in samples().tensors[:2]))


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def float32_task(**changes: Any) -> lockstep.Task:
    model = partial(nn.Linear, 6, 4)
    return make_task(**{"model": model, "dataset": float32_samples, "loss": squared_error, **changes})


def devices_with_contexts() -> list[int]:
    """Return the CUDA devices that this process has a context on: each costs some 500 MB of its memory."""
    return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]


def one_context(world: World, folder: str | None = None) -> None:
    """All that `fit` does in threads of its own uses the device of the rank: the record, checkpoints, compression."""
    result = lockstep.fit(
        float32_task(),
        strategy="ddp",
        steps=12,
        compression="int8",
        clip=1.0,
        run_dir=None if folder is None else f"{folder}/run",
        checkpoint=None if folder is None else f"{folder}/checkpoints",
        checkpoint_every=None if folder is None else 3,
        quiet=True,
    )
    assert len(result.losses) == 12
    if world.device.type == "cuda":
        assert devices_with_contexts() == [world.device.index]


def train_to(world: World, runs: list[tuple[str, int]], strategy: str) -> list[list[float]]:
    """Train, or go on, in these folders up to these steps, each with a checkpoint at the end; return the losses."""

    def losses(folder: str, num_steps: int) -> list[float]:
        result = lockstep.fit(
            make_task(), strategy=strategy, steps=num_steps, checkpoint=folder, checkpoint_every=num_steps, quiet=True
        )
        return result.losses

    return [losses(*each) for each in runs]


def resume_on_fewer(run: Callable[..., list[Any]], num_ranks: int, folder: str, strategy: str) -> None:
    """A run that goes on with fewer ranks, and then with all again, has the losses of one that was never stopped.

    Args:
        run: ``run(fn, *args, devices=n)`` returns what ``fn(world, *args)`` returns on each of n ranks.
        num_ranks: How many there are; one is enough to resume on as many.
        folder: For checkpoints.
        strategy: Of `fit`.
    """
    whole, parts = f"{folder}/whole", f"{folder}/parts"
    expected, found = run(train_to, [(whole, 9), (parts, 3)], strategy, devices=num_ranks)[0]
    found += run(train_to, [(parts, 6)], strategy, devices=max(1, num_ranks // 2))[0][0]
    found += run(train_to, [(parts, 9)], strategy, devices=num_ranks)[0][0]
    assert found == pytest.approx(expected, rel=1e-11)


LOST = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
REPORTED_WITHIN_S = 60.0


def launch_losing(
    num_ranks: int, how: str, device: str | None = None, prepare: Callable[[], None] | None = None
) -> None:
    """A rank that a signal stops or kills in its fifth step ends the job, by name, while the others wait for it.

    ``prepare`` is called in each rank before it joins the others.
    """

    def train() -> None:
        if prepare is not None:
            prepare()
        calls = []

        def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            calls.append(1)
            if len(calls) == 5 and world.rank == num_ranks - 1:
                began.touch()
                os.kill(os.getpid(), LOST[how])
            return squared_error(model, batch)

        with lockstep.init(device=device) as world:
            lockstep.fit(float32_task(loss=loss), strategy="ddp", steps=400, quiet=True)

    with tempfile.TemporaryDirectory() as folder:
        began = Path(folder, "began")
        with pytest.raises(JobHangs if how == "stopped" else RankFailed) as caught:
            launch_with(train, (), devices=num_ranks, timeout_s=200.0, watchdog_s=6.0, logs=LogSettings(merges=False))
        waited_s = time.time() - began.stat().st_mtime
    last = num_ranks - 1
    what = f"rank {last} was stopped by a signal (SIGSTOP)" if how == "stopped" else f"Rank {last} was killed"
    assert what in str(caught.value)
    assert waited_s < REPORTED_WITHIN_S


# --- all of them -----------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[World], None]] = {
    **{f"torch's gradients, {name}": partial(against_torch, name=name) for name in ("mlp", "cnn", "transformer")},
    "torch's gradients, unused parameters": partial(against_torch, name="reused"),
    "torch's gradients, no_sync": partial(against_torch, name="mlp", num_micro=3),
    "torch's gradients, float32": partial(against_torch, name="mlp", dtype=torch.float32, tolerance=1e-5),
    "torch's gradients, bfloat16 weights": partial(against_torch, name="mlp", dtype=torch.bfloat16, tolerance=2**-6),
    "torch's gradients, bf16 autocast": partial(
        against_torch, name="mlp", dtype=torch.float32, autocast=torch.bfloat16, tolerance=2**-7
    ),
    "torch's gradients, fp16 autocast": partial(
        against_torch, name="mlp", dtype=torch.float32, autocast=torch.float16, tolerance=2**-9
    ),
    "100 steps, bf16 autocast": partial(in_bf16, weights=torch.float32, autocast=True, tolerance=0.02),
    "100 steps, bfloat16 weights": partial(in_bf16, weights=torch.bfloat16, autocast=False, tolerance=0.1),
    **{f"weights, {name}": partial(uneven, name=name) for name in ("mlp", "transformer", "reused")},
    "zero": partial(zero, name="cnn", shard_gradients=False),
    "zero, overlapping": partial(zero, name="mlp", shard_gradients=False, overlaps=True),
    "zero, sharded gradients": partial(zero, name="cnn", shard_gradients=True),
    "zero, sharded gradients, unused parameters": partial(zero, name="reused", shard_gradients=True, overlaps=True),
    "optimizer in backward": optimizer_in_backward,
    **{f"compression, {method}": partial(compressed, method=method) for method in ("bf16", "fp16")},
    **{f"compression, {method}": partial(compressed, method=method) for method in ("int8", "int4", "powersgd:2")},
    "batch norm": batch_norm,
    **{f"captured, {name}": partial(captured, name=name) for name in ("mlp", "transformer")},
    "compiled": partial(compiled, backend="aot_eager"),
    "one context": one_context,
}
ALIKE = (
    "torch's gradients, float32",
    "torch's gradients, bf16 autocast",
    "100 steps, bf16 autocast",
    "torch's gradients, mlp",  # as without no_sync
    "torch's gradients, cnn",
    "weights, mlp",
    "zero",
    "zero, sharded gradients",
    "compression, bf16",
    "compression, int4",
    "captured, mlp",
    "one context",  # as with a record and checkpoints
)
"""Repeat what another scenario does, with another model or dtype."""
SLOW = ("compiled",)
"""Takes seconds where nothing else has imported the compiler."""


def run_in_turn(world: World, names: list[str], folder: str) -> None:
    """Run these scenarios; leave a file for each that all ranks have come through. A failed one ends the job."""
    for number, name in enumerate(names):
        SCENARIOS[name](world)
        world.barrier()
        if world.is_rank_zero:
            Path(folder, f"{number}").touch()


# --- on CPU ranks -----------------------------------------------------------------------------------------------------

EAGER = [name for name in SCENARIOS if name not in SLOW]
# On the CPU other tests have most of it, too; these are enough to keep what tests/gpu runs in order.
QUICK = [
    "torch's gradients, mlp",
    "weights, reused",
    "zero, overlapping",
    "compression, int8",
    "captured, mlp",
    "batch norm",
]


@pytest.mark.parametrize("name", [*QUICK, *soak([name for name in SCENARIOS if name not in QUICK])])
def test_two_ranks(ranks, name):
    ranks(2, warnings="default")(SCENARIOS[name], timeout=100)


@pytest.mark.parametrize("name", soak(EAGER))
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_other_numbers_of_ranks(ranks, num_ranks, name):
    ranks(num_ranks, warnings="default")(SCENARIOS[name])


@pytest.mark.parametrize("strategy", ["ddp", *soak(["ddp-zero1", "fsdp"])])
def test_a_run_goes_on_with_fewer_ranks(ranks, tmp_path, strategy):
    def run(fn, *args, devices):
        return ranks(devices, warnings="default")(fn, *args)

    resume_on_fewer(run, 2, str(tmp_path), strategy)


@pytest.mark.parametrize("how", soak(["killed", "stopped"]))
def test_a_lost_rank_is_named(how):
    launch_losing(2, how, device="cpu")
