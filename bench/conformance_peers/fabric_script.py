"""Lightning Fabric in a script, as its guides write it."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from bench.conformance_peers import shared
from bench.conformance_peers.shared import SEEDS, UNUSED, Case, record
from bench.conformance_peers.torch_ddp import Shard

PACKAGES = ("lightning",)
OWN_SAMPLER, SYNC = "use_distributed_sampler=False, own sampler", "SyncBatchNorm"
SWITCHES = {
    "uneven": (OWN_SAMPLER,),
    "batchnorm": (SYNC,),
    "metrics": (OWN_SAMPLER,),
    "unfreeze": (UNUSED,),
    "dropout": (SEEDS,),
}
FORKS = False
"""In a forked process it does not start."""
command = shared.torchrun


def train(case: Case) -> None:
    """Train or evaluate."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy = "ddp_find_unused_parameters_true" if case.switch == UNUSED else "ddp"
    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy=strategy)
    fabric.launch()
    seed_everything(0, verbose=False)
    module: nn.Module = shared.make_model(case)
    if case.switch == SEEDS:
        seed_everything(fabric.global_rank, verbose=False)
    if case.switch == SYNC:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model, optimizer = fabric.setup(module, shared.make_optimizer(module.parameters()))
    data = shared.make_data(case)
    if case.switch == OWN_SAMPLER:
        own = DataLoader(data, batch_size=case.micro_batch(num_ranks), sampler=Shard(len(data)))
        loader: Any = fabric.setup_dataloaders(own, use_distributed_sampler=False)
    else:
        loader = fabric.setup_dataloaders(
            DataLoader(data, batch_size=case.micro_batch(num_ranks), shuffle=case.shuffle)
        )
    second = fabric.setup_dataloaders(DataLoader(shared.make_second(case), batch_size=case.micro_batch(num_ranks) // 2))
    if case.evaluates:
        evaluate(fabric, model, loader)
        return
    scheduler = shared.make_schedule(optimizer)
    saved, first_epoch = Path(case.folder) / "saved.ckpt", 0
    state = {"model": model, "optimizer": optimizer, "step": 0, "epoch": 0}
    if saved.exists() and (case.resumes or case.kill_at):
        fabric.load(saved, state)
        first_epoch = int(state["epoch"])
    step = int(state["step"])
    if case.looks and fabric.global_rank == 0:
        next(iter(loader))
    if case.evaluates_first:
        evaluate(fabric, model, fabric.setup_dataloaders(DataLoader(data, batch_size=case.micro_batch(num_ranks))))
        model.train()
    shared.freeze_late(case, module)
    for epoch in range(first_epoch, case.epochs):
        shared.unfreeze_if_due(case, epoch, module)
        number_of_batches = 0 if case.divided else len(loader)  # a stream has no length
        for number, batch in enumerate(shared.read(case, fabric.global_rank, loader, second), 1):
            shared.kill_if_due(case, fabric.global_rank, step + 1)
            first = (number - 1) // case.accumulate * case.accumulate
            accumulates = number % case.accumulate != 0 and number < number_of_batches
            with fabric.no_backward_sync(model, enabled=accumulates):
                size = min(case.accumulate, number_of_batches - first) if case.accumulate > 1 else 1
                fabric.backward(shared.loss_of(model, batch) / size)
            if accumulates:
                continue
            if case.edits:
                shared.first_parameter(module).grad.mul_(2)
            if case.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            optimizer.zero_grad()
            if case.schedule:
                scheduler.step()
            step += 1
            shared.edit_if_due(case, fabric.global_rank, step, module)
            if step == case.stop_at:
                fabric.save(saved, {**state, "step": step, "epoch": epoch})
                return
        if case.kill_at:
            fabric.save(saved, {**state, "step": step, "epoch": epoch + 1})
        if case.alone and epoch == 0 and fabric.is_global_zero:
            fabric.all_reduce(torch.zeros(1))
    shared.record_end(module)


def evaluate(fabric: Any, model: Any, loader: Any) -> None:
    """Sum over the batches of this rank, then over ranks."""
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in loader:
            logits, count = model(batch["inputs"]), len(batch["labels"])
            loss = shared.loss_from(logits, batch["labels"])
            total += torch.stack([loss * count, shared.right_of(logits, batch).sum(), torch.tensor(float(count))])
    total = fabric.all_reduce(total, reduce_op="sum")
    record("metrics", loss=float(total[0] / total[2]), accuracy=float(total[1] / total[2]))
