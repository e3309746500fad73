"""Everything that trains the same model on two ranks: what a step of each is, and whether it can run here.

    none         no synchronisation at all: what a step costs by itself, the bound for the others
    torch        torch.nn.parallel.DistributedDataParallel on Gloo
    torch-view   the same with gradient_as_bucket_view=True, which saves it the copies out of its buckets
    torch-shm    torch's on our shared-memory backend
    torch-zero   torch's on Gloo with torch's ZeroRedundancyOptimizer
    accelerate   Hugging Face Accelerate, as it comes: torch's DistributedDataParallel on Gloo
    fabric       Lightning Fabric, as it comes: likewise
    ours         lockstep.DistributedDataParallel on shm, which `lockstep.init` takes by itself
    ours-gloo    the same on Gloo
    ours-alone   lockstep's for a rank that is alone, with all that it does among many: without a hook it does nothing
    ours-zero    lockstep.DistributedDataParallel on shm with lockstep.ZeroRedundancyOptimizer
    dp           lockstep.DataParallel: the batches of all ranks in one process, on as many CPU devices as ranks
    single       one process and one core for the batches of all ranks

All use AdamW, with torch's defaults or fused, which is faster on CPUs, too. ``dp`` and ``single`` run on rank 0 alone,
while the others sleep. On GPUs (bench/gpu_steps.py) NCCL's group takes the place of both Gloo's and that of shm.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from bench.models import Batch, Workload, loss_of
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.parallel.ddp.comm_hooks import AllReduceMean

LEARNING_RATE = 1e-4
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)
ON_RANK_ZERO = ("dp", "single")
NEEDS = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
"""The module that a contender needs, which `make bench` installs; without it the contender is reported as missing."""

Step = Callable[[Batch], None]


@dataclass(frozen=True)
class Ranks:
    """The groups of the ranks that measure: Gloo's is the default one, since peers use that as it comes."""

    gloo: dist.ProcessGroup
    shm: dist.ProcessGroup
    batches: list[Batch]
    """Of all ranks, by rank; each rank has them all, and trains on its own, or on all of them as ``dp`` does."""
    options: dict[str, Any]
    """Of AdamW."""
    device: torch.device = CPU
    """Of this rank."""


@dataclass(frozen=True)
class Trainee:
    """A model as it was before it was wrapped, and a step of its training."""

    bare: nn.Module
    step: Step


def plain_step(
    model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> Step:
    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        backward(loss_of(model, batch))
        optimizer.step()

    return step


def adamw(model: nn.Module, ranks: Ranks) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ranks.options)


def none(model: nn.Module, ranks: Ranks) -> Step:
    return plain_step(model, adamw(model, ranks))


def torch_gloo(model: nn.Module, ranks: Ranks) -> Step:
    return plain_step(TorchDDP(model, process_group=ranks.gloo), adamw(model, ranks))


def torch_view(model: nn.Module, ranks: Ranks) -> Step:
    return plain_step(TorchDDP(model, process_group=ranks.gloo, gradient_as_bucket_view=True), adamw(model, ranks))


def torch_shm(model: nn.Module, ranks: Ranks) -> Step:
    return plain_step(TorchDDP(model, process_group=ranks.shm), adamw(model, ranks))


def torch_zero(model: nn.Module, ranks: Ranks) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    optimizer = TorchZero(model.parameters(), torch.optim.AdamW, process_group=ranks.gloo, **ranks.options)
    return plain_step(TorchDDP(model, process_group=ranks.gloo), optimizer)


def accelerate(model: nn.Module, ranks: Ranks) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, adamw(model, ranks))
    return plain_step(wrapped, optimizer, accelerator.backward)


def fabric(model: nn.Module, ranks: Ranks) -> Step:
    from lightning_fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    runner.launch()
    wrapped, optimizer = runner.setup(model, adamw(model, ranks))
    return plain_step(wrapped, optimizer, runner.backward)


def ours(model: nn.Module, ranks: Ranks) -> Step:
    return plain_step(lockstep.DistributedDataParallel(model, process_group=ranks.shm), adamw(model, ranks))


def ours_gloo(model: nn.Module, ranks: Ranks) -> Step:
    return plain_step(lockstep.DistributedDataParallel(model, process_group=ranks.gloo), adamw(model, ranks))


def ours_alone(model: nn.Module, ranks: Ranks) -> Step:
    wrapped = lockstep.DistributedDataParallel(model, process_group=ranks.shm)
    wrapped.reducer.set_reduction(AllReduceMean(ranks.shm))
    return plain_step(wrapped, adamw(model, ranks))


def ours_zero(model: nn.Module, ranks: Ranks) -> Step:
    wrapped = lockstep.DistributedDataParallel(model, process_group=ranks.shm)
    optimizer = lockstep.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=ranks.shm, shard_gradients=True, **ranks.options
    )
    return plain_step(wrapped, optimizer)


def dp(model: nn.Module, ranks: Ranks) -> Step:
    optimizer, count = adamw(model, ranks), len(ranks.batches)
    wrapped = lockstep.DataParallel(model, ["cpu"] * count)
    scales = [1 / count] * count

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        wrapped.backward(loss_of, ranks.batches, scales)
        optimizer.step()

    return step


def single(model: nn.Module, ranks: Ranks) -> Step:
    step = plain_step(model, adamw(model, ranks))
    inputs, targets = zip(*ranks.batches, strict=True)
    whole = torch.cat(inputs), torch.cat(targets)
    return lambda batch: step(whole)


MAKE: dict[str, Callable[[nn.Module, Ranks], Step]] = {
    "none": none,
    "torch": torch_gloo,
    "torch-view": torch_view,
    "torch-shm": torch_shm,
    "torch-zero": torch_zero,
    "accelerate": accelerate,
    "fabric": fabric,
    "ours": ours,
    "ours-gloo": ours_gloo,
    "ours-alone": ours_alone,
    "ours-zero": ours_zero,
    "dp": dp,
    "single": single,
}


def missing() -> dict[str, str]:
    """Return why contenders cannot run here, by name; empty where `make bench` has installed everything."""
    absent = {name: module for name, module in NEEDS.items() if not importlib.util.find_spec(module)}
    return {name: f"{module} is not installed" for name, module in absent.items()}


def join_ranks(workload: Workload, *, fused: bool = False) -> Ranks:
    """Make both groups and all batches; a rank that is alone has the default group as both. ``fused``: the optimizer.

    Collective: every rank of the default group, which is Gloo's.

    Raises:
        RuntimeError: The ranks cannot share memory, so there is nothing to measure.
    """
    gloo = shm = dist.group.WORLD
    if dist.get_world_size() > 1:
        shm = dist.new_group(backend="shm", timeout=TIMEOUT)
        if not isinstance(shm, ShmProcessGroup):
            raise RuntimeError("The ranks cannot share memory here, so there is nothing to measure.")
    assert gloo is not None and shm is not None
    batches = []
    for rank in range(dist.get_world_size()):
        torch.manual_seed(1 + rank)
        batches.append(workload.batch())
    return Ranks(gloo, shm, batches, {"lr": LEARNING_RATE, **({"fused": True} if fused else {})})


def make_trainee(name: str, workload: Workload, ranks: Ranks) -> Trainee | None:
    """Return a contender with the weights that all start from, or None where it runs on rank 0 alone.

    Collective: every rank.
    """
    if name in ON_RANK_ZERO and dist.get_rank() > 0:
        return None
    torch.manual_seed(0)
    with ranks.device:  # a GPU fills a billion weights at once
        model = workload.model()
    return Trainee(model, MAKE[name](model, ranks))
