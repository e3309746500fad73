"""DeepSpeed in a script, as its "Getting started" writes it: ``deepspeed.initialize`` makes the loader, too."""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, Subset

from bench.conformance_peers import shared
from bench.conformance_peers.shared import Case
from bench.conformance_peers.torch_ddp import evaluate

PACKAGES = ("deepspeed",)
ZERO1, OWN_LOADER, EDIT = "ZeRO stage 1", "own DataLoader with DistributedSampler", "safe_set_full_grad, ZeRO stage 1"
SWITCHES = {
    "gradients": ("float64", ZERO1, "training_data"),
    "clip": (ZERO1,),
    "edit": (EDIT,),
    "batchnorm": ("SyncBatchNorm",),
    "shuffle": (OWN_LOADER,),
    "look": (OWN_LOADER,),
}
DTYPE = "float32"
command = shared.torchrun


def train(case: Case) -> None:
    """Train or evaluate."""
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    data: Any = shared.make_data(case)
    if case.fewer and rank == shared.VICTIM:
        data = Subset(data, range(len(data) - shared.BATCH))
    module: nn.Module = shared.make_model(case)
    if case.switch == "SyncBatchNorm":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    optimizer = shared.make_optimizer(module.parameters())
    stage = 1 if case.switch in (ZERO1, EDIT) else 0
    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch(num_ranks),
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": case.clip or 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    # The loader that deepspeed.initialize makes of training_data shuffles.
    makes_loader = case.switch == "training_data" or (case.shuffle and case.switch != OWN_LOADER)
    engine, _, loader, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=shared.make_schedule(optimizer) if case.schedule else None,
        training_data=data if makes_loader else None,
        config=config,
    )
    if not makes_loader:
        sampler = DistributedSampler(data, num_ranks, rank, shuffle=case.shuffle)
        loader = DataLoader(data, batch_size=case.micro_batch(num_ranks), sampler=sampler)
    if case.evaluates:
        evaluate(engine, loader)
    else:
        loop(case, engine, loader, module, rank)


def loop(case: Case, engine: Any, loader: Any, module: nn.Module, rank: int) -> None:
    """Train."""
    step, first_epoch, folder = 0, 0, Path(case.folder)
    if (folder / "latest").exists() and (case.resumes or case.kill_at):
        _, state = engine.load_checkpoint(case.folder)
        step, first_epoch = state["step"], state["epoch"]
    if case.looks and rank == 0:
        next(iter(loader))
    for epoch in range(first_epoch, case.epochs):
        sampler = getattr(loader, "data_sampler", None) or getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and not isinstance(sampler, SequentialSampler):
            sampler.set_epoch(epoch)
        for batch in loader:
            shared.kill_if_due(case, rank, step + 1)
            engine.backward(shared.loss_of(engine, batch))
            if case.edits:
                edit(case, module)
            is_boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            step += is_boundary
            if is_boundary and step == case.stop_at:
                engine.save_checkpoint(case.folder, client_state={"step": step, "epoch": epoch})
                return
        if case.kill_at:
            engine.save_checkpoint(case.folder, client_state={"step": step, "epoch": epoch + 1})
        if case.alone and epoch == 0 and rank == 0:
            dist.all_reduce(torch.zeros(1))
    shared.record_end(engine.module)


def edit(case: Case, module: nn.Module) -> None:
    """Double a gradient."""
    first = shared.first_parameter(module)
    if case.switch == EDIT:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        safe_set_full_grad(first, safe_get_full_grad(first) * 2)
    else:
        first.grad.mul_(2)
