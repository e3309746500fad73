"""Lockstep's classes in the place of torch's, as sections 1 to 8 of docs/script.md write it."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from bench.conformance_peers import shared
from bench.conformance_peers.shared import Case, record

PACKAGES = ("lockstep-torch",)
GLOO, WEIGHTS, SYNC = "Gloo", "mean_over, pad=False", "SyncBatchNorm"
RECOVERY = "lockstep.Recovery"
SWITCHES = {
    "gradients": (GLOO,),
    "resume": (GLOO,),
    "uneven": (WEIGHTS,),
    "tokens": (WEIGHTS,),
    "batchnorm": (SYNC,),
    "killed": (RECOVERY,),
    "fewer": (GLOO, "model.join()"),
    "alone": (GLOO,),
}


def command(num_ranks: int, restarts: int) -> list[str]:
    """Return that of docs/script.md."""
    run = [sys.executable, "-m", "lockstep", "run", "--devices", str(num_ranks)]
    return [*run, *(["--max-restarts", str(restarts)] if restarts else []), shared.SCRIPT]


def train(case: Case) -> None:
    """Train or evaluate."""
    with lockstep.init(backend="gloo" if case.switch == GLOO else None) as world:
        module = shared.make_model(case)
        if case.switch == SYNC:
            module = lockstep.SyncBatchNorm.convert_sync_batchnorm(module)
        if case.evaluates:
            evaluate(case, world, lockstep.DistributedDataParallel(module))
        elif case.switch == RECOVERY:
            recover(case, world, module)
        else:
            by_hand(case, world, module)


def by_hand(case: Case, world: Any, module: nn.Module) -> None:
    """Train with the wrapper and the sampler."""
    data = shared.make_data(case)
    model: Any = lockstep.DistributedDataParallel(module)
    lockstep.seed(world, 0)
    size = case.micro_batch(world.world_size)
    sampler: Any = None  # of a stream
    if not case.divided:
        sampler = lockstep.DistributedSampler(data, shuffle=case.shuffle, seed=0, pad=case.switch != WEIGHTS)
    loader = DataLoader(data, batch_size=size, sampler=sampler)
    extra = shared.make_second(case)
    second = DataLoader(extra, batch_size=size // 2, sampler=lockstep.DistributedSampler(extra, shuffle=False))
    optimizer = shared.make_optimizer(model.parameters())
    scheduler = shared.make_schedule(optimizer)
    saved, step, first_epoch = Path(case.folder) / "saved", 0, 0
    if case.resumes or (case.kill_at and saved.exists()):
        state = lockstep.load(saved, model=model, optimizer=optimizer, loader=loader)
        step, first_epoch = state["step"], state["epoch"]
    if case.looks and world.rank == 0:
        next(iter(loader))
    if case.evaluates_first:
        evaluate(case, world, model)
        model.train()
    for epoch in range(first_epoch, case.epochs):
        shared.unfreeze_if_due(case, epoch, module)
        with model.join() if case.switch == "model.join()" else nullcontext():
            for group in shared.groups(shared.read(case, world.rank, loader, second), case.accumulate):
                shared.kill_if_due(case, world.rank, step + 1)
                for number, batch in enumerate(group, 1):
                    with model.no_sync() if number < len(group) else nullcontext():
                        loss = shared.loss_of(model, batch)
                        if case.switch == WEIGHTS:
                            lockstep.backward(loss, mean_over=shared.count_of(batch))
                        else:
                            (loss / len(group)).backward()
                if case.edits:
                    shared.first_parameter(module).grad.mul_(2)
                if case.clip is not None:
                    model.clip_grad_norm_(case.clip)
                optimizer.step()
                optimizer.zero_grad()
                if case.schedule:
                    scheduler.step()
                step += 1
                shared.edit_if_due(case, world.rank, step, module)
                if step == case.stop_at:
                    lockstep.save(saved, model=model, optimizer=optimizer, loader=loader, step=step, epoch=epoch)
                    return
        if case.kill_at:
            lockstep.save(saved, model=model, optimizer=optimizer, loader=loader, step=step, epoch=epoch + 1)
        if case.alone and epoch == 0 and world.rank == 0:
            dist.all_reduce(torch.zeros(1))
    shared.record_end(module)


def recover(case: Case, world: Any, module: nn.Module) -> None:
    """Train in blocks, whose samples follow from the step."""
    data, steps_per_epoch = shared.make_data(case), case.num_samples // shared.BATCH
    model: Any = lockstep.DistributedDataParallel(module)
    optimizer = shared.make_optimizer(model.parameters())
    recovery = lockstep.Recovery(world, model=model, optimizer=optimizer)
    while recovery.step < case.epochs * steps_per_epoch:
        with recovery.attempt():
            start = recovery.step % steps_per_epoch * shared.BATCH
            mine = range(start + world.rank, start + shared.BATCH, world.world_size)
            shared.kill_if_due(case, world.rank, recovery.step + 1)
            batch = torch.utils.data.default_collate([data[index] for index in mine])
            shared.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    shared.record_end(module)


def evaluate(case: Case, world: Any, model: Any) -> None:
    """Sum over this rank's part, then over ranks."""
    data = shared.make_data(case)
    mine = torch.utils.data.default_collate([data[i] for i in range(world.rank, len(data), world.world_size)])
    model.eval()
    with torch.no_grad():
        logits = model.module(mine["inputs"])
    count = len(mine["labels"])
    loss = shared.loss_from(logits, mine["labels"])
    total = torch.stack([loss * count, shared.right_of(logits, mine).sum(), torch.tensor(float(count))])
    dist.all_reduce(total)
    record("metrics", loss=float(total[0] / total[2]), accuracy=float(total[1] / total[2]))
