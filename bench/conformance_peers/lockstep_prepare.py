"""`lockstep.prepare` in a script for one device, as README.md and section 0 of docs/script.md write it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from bench.conformance_peers import shared
from bench.conformance_peers.lockstep_script import command
from bench.conformance_peers.shared import Case, record

PACKAGES = ("lockstep-torch",)
MEAN_OVER = "lockstep.backward(mean_over=)"
SWITCHES = {
    "tokens": (MEAN_OVER,),
    "batchnorm": ("sync_batchnorm=False",),
    "second": ("53 and 26 samples",),
    "ahead": ("53 samples",),
    "divided": ("loader not prepared",),
}
__all__ = ["command"]


def train(case: Case) -> None:
    """Train or evaluate: the script for one device, with one line more."""
    saved = Path(case.folder) / "saved"
    goes_on = case.resumes or (case.kill_at is not None and saved.exists())
    model: Any = shared.make_model(case)
    loader: Any = DataLoader(shared.make_data(case), batch_size=shared.BATCH // case.accumulate, shuffle=case.shuffle)
    optimizer = shared.make_optimizer(model.parameters())
    scheduler = shared.make_schedule(optimizer)
    others: list[Any] = []
    if case.second:
        others = [DataLoader(shared.make_second(case), batch_size=shared.BATCH // 2)]
    if case.evaluates or case.evaluates_first:
        others = [DataLoader(shared.make_data(case), batch_size=shared.BATCH)]
    if case.switch == "sync_batchnorm=False":
        model, optimizer, scheduler, loader = lockstep.prepare(
            model, optimizer, scheduler, loader, sync_batchnorm=False
        )
    elif case.switch == "loader not prepared":
        model, optimizer, scheduler = lockstep.prepare(model, optimizer, scheduler)
        loader = DataLoader(loader.dataset, batch_size=shared.BATCH // dist.get_world_size())
    else:
        model, optimizer, scheduler, loader, *others = lockstep.prepare(model, optimizer, scheduler, loader, *others)
    if case.evaluates:
        evaluate(model, *others)
        return
    rank, step, first_epoch = dist.get_rank(), 0, 0
    if goes_on:
        state = lockstep.load(saved, model=model, optimizer=optimizer, loader=loader)
        step, first_epoch = state["step"], state["epoch"]
    if case.looks and rank == 0:
        next(iter(loader))
    if case.evaluates_first:
        evaluate(model, *others)
        model.train()
    for epoch in range(first_epoch, case.epochs):
        shared.unfreeze_if_due(case, epoch, model.module)
        for group in shared.groups(shared.read(case, rank, loader, *others[: case.second]), case.accumulate):
            shared.kill_if_due(case, rank, step + 1)
            for batch in group:
                loss = shared.loss_of(model, batch)
                if case.switch == MEAN_OVER:
                    lockstep.backward(loss, mean_over=shared.count_of(batch))
                else:
                    (loss / len(group)).backward()
            if case.edits:
                shared.first_parameter(model).grad.mul_(2)
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
            if case.schedule:
                scheduler.step()
            step += 1
            shared.edit_if_due(case, rank, step, model)
            if step == case.stop_at:
                lockstep.save(saved, model=model, optimizer=optimizer, loader=loader, step=step, epoch=epoch)
                return
        if case.kill_at:
            lockstep.save(saved, model=model, optimizer=optimizer, loader=loader, step=step, epoch=epoch + 1)
        if case.alone and epoch == 0 and rank == 0:
            dist.all_reduce(torch.zeros(1))
    shared.record_end(model.module)


def evaluate(model: Any, loader: Any) -> None:
    """Gather the outputs of all ranks."""
    model.eval()
    with torch.no_grad():
        outputs = [(model(batch["inputs"]), batch["labels"]) for batch in loader]
    logits, labels = loader.gather(outputs)
    accuracy = (logits.argmax(-1) == labels).double().mean().item()
    record("metrics", loss=shared.loss_from(logits, labels).item(), accuracy=accuracy)
