"""torch's DistributedDataParallel with its DistributedSampler, as the pages and tutorials of torch write it."""

import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bench.conformance_peers import shared
from bench.conformance_peers.shared import SEEDS, UNUSED, Case, record

PACKAGES = ("torch", "torchdata")
STATEFUL, OWN_SAMPLER = "StatefulDataLoader", "own sampler, without padding"
SWITCHES = {
    "uneven": ("drop_last=True", "no sampler padding, Join"),
    "batchnorm": ("SyncBatchNorm",),
    "resume": (STATEFUL,),
    "dropout": (SEEDS,),
    "metrics": (OWN_SAMPLER,),
    "fewer": ("Join",),
    "unfreeze": (UNUSED,),
}
command = shared.torchrun


class Shard(torch.utils.data.Sampler[int]):
    """Each sample on one rank only, for `Join`, which is for uneven inputs."""

    def __init__(self, size: int) -> None:
        self.indices = range(dist.get_rank(), size, dist.get_world_size())

    def __iter__(self) -> Any:
        """Return the indices of this rank."""
        return iter(self.indices)

    def __len__(self) -> int:
        """Return their number."""
        return len(self.indices)


def train(case: Case) -> None:
    """Train or evaluate."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, rank, world_size = shared.make_data(case), dist.get_rank(), dist.get_world_size()
    model: Any = shared.make_model(case)
    if case.switch == "SyncBatchNorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, find_unused_parameters=case.switch == UNUSED)
    if case.switch == SEEDS:
        torch.manual_seed(rank)
    train_loop(case, model, data, rank, world_size)
    dist.destroy_process_group()


def train_loop(case: Case, model: Any, data: Any, rank: int, world_size: int) -> None:
    """Train the wrapped model with a loop of torch."""
    sampler: Any = (
        None
        if case.divided
        else DistributedSampler(data, shuffle=case.shuffle, drop_last=case.switch == "drop_last=True")
    )
    if case.switch in ("no sampler padding, Join", OWN_SAMPLER):
        sampler = Shard(len(data))
    if case.switch == STATEFUL:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        Loader = DataLoader
    loader = Loader(data, batch_size=case.micro_batch(world_size), sampler=sampler)
    extra = shared.make_second(case)
    second = DataLoader(
        extra, batch_size=case.micro_batch(world_size) // 2, sampler=DistributedSampler(extra, shuffle=False)
    )
    if case.evaluates:
        evaluate(model, loader)
        return
    optimizer = shared.make_optimizer(model.parameters())
    scheduler = shared.make_schedule(optimizer)
    snapshot, step, first_epoch = Path(case.folder) / "snapshot.pt", 0, 0
    if snapshot.exists() and (case.resumes or case.kill_at):
        saved = torch.load(snapshot, weights_only=False)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, first_epoch = saved["step"], saved["epoch"]
        if case.switch == STATEFUL:
            loader.load_state_dict(torch.load(snapshot.with_suffix(f".{rank}"), weights_only=False))

    def save(epoch: int) -> None:
        if case.switch == STATEFUL:
            torch.save(loader.state_dict(), snapshot.with_suffix(f".{rank}"))
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step, "epoch": epoch}, f"{snapshot}.new")
            os.replace(f"{snapshot}.new", snapshot)
        dist.barrier()

    if case.looks and rank == 0:
        next(iter(loader))
    if case.evaluates_first:
        test = DistributedSampler(data, shuffle=False)
        evaluate(model, DataLoader(data, batch_size=case.micro_batch(world_size), sampler=test))
        model.train()
    shared.freeze_late(case, model.module)
    for epoch in range(first_epoch, case.epochs):
        shared.unfreeze_if_due(case, epoch, model.module)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        with Join([model]) if "Join" in case.switch else nullcontext():
            for group in shared.groups(shared.read(case, rank, loader, second), case.accumulate):
                shared.kill_if_due(case, rank, step + 1)
                with ExitStack() as unsynchronised:
                    for number, batch in enumerate(group, 1):
                        if number < len(group):
                            unsynchronised.enter_context(model.no_sync())
                        else:
                            unsynchronised.close()
                        (shared.loss_of(model, batch) / len(group)).backward()
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
                    save(epoch)
                    return
        if case.kill_at:
            save(epoch + 1)
        if case.alone and epoch == 0 and rank == 0:
            dist.all_reduce(torch.zeros(1))
    shared.record_end(model.module)


def evaluate(model: Any, loader: Any) -> None:
    """Sum over the batches of this rank, then over ranks."""
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in loader:
            logits, count = model(batch["inputs"]), len(batch["labels"])
            loss = shared.loss_from(logits, batch["labels"])
            total += torch.stack([loss * count, shared.right_of(logits, batch).sum(), torch.tensor(float(count))])
    dist.all_reduce(total)
    record("metrics", loss=float(total[0] / total[2]), accuracy=float(total[1] / total[2]))
