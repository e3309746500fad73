"""Scripts with a fault planted in each, and one without: what the doctor reads in them. None is ever run."""

from typing import NamedTuple

from lockstep.study.doctor.findings import HANG, WRONG, Severity

SOUND = """\
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split


def is_main_process():
    return dist.get_rank() == 0


def save_checkpoint(model, path):
    torch.save(model.state_dict(), path)


def evaluate(model, loader, rank):
    total = torch.zeros(1)
    for x, y in loader:
        total += (model(x) - y).abs().sum()
    dist.all_reduce(total)
    if rank == 0:
        print(total)


def main(dataset):
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank()
    torch.manual_seed(0)
    if rank != 0:
        dist.barrier()  # rank zero downloads first
    download(dataset)
    if rank == 0:
        dist.barrier()
    train_set, val_set = random_split(dataset, [80, 20])
    sampler = DistributedSampler(train_set) if distributed else None
    loader = DataLoader(train_set, batch_size=32, shuffle=(sampler is None), sampler=sampler, num_workers=2)
    val_loader = DataLoader(val_set, batch_size=32)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(torch.device("cuda"))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.load_state_dict(torch.load("start.pt", map_location="cpu", weights_only=True))
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            (model(x) - y).square().mean().backward()
        evaluate(model, val_loader, rank)
        if is_main_process():
            save_checkpoint(model, "model.pt")
        torch.save(torch.get_rng_state(), f"random_{rank}.pt")
        if rank == 0 and epoch == 2:
            print(model.module(x))
    dist.destroy_process_group()


main(numbers)
"""


class Change(NamedTuple):
    """Text of the sound script, what replaces it, and what is to be found, with the text of its line."""

    old: str
    new: str
    kind: str
    severity: Severity
    line: str
    found: str


CHANGES = [
    Change(
        "shuffle=(sampler is None), sampler=sampler",
        "shuffle=True",
        "sampler-missing",
        WRONG,
        "loader = DataLoader(train_set",
        "DataLoader of train_set has no sampler that knows of ranks.",
    ),
    Change(
        "shuffle=(sampler is None), sampler=sampler",
        "sampler=None",
        "sampler-missing",
        WRONG,
        "loader = DataLoader(train_set",
        "DataLoader of train_set has no sampler that knows of ranks.",
    ),
    Change(
        "        sampler.set_epoch(epoch)\n",
        "",
        "set-epoch-missing",
        WRONG,
        "sampler = DistributedSampler",
        "sampler is a DistributedSampler that shuffles, and nothing calls set_epoch.",
    ),
    Change(
        "        if is_main_process():\n            save_checkpoint",
        "        if epoch % 2 == 0:\n            save_checkpoint",
        "saves-on-all-ranks",
        WRONG,
        "torch.save(model.state_dict(), path)",
        "torch.save writes path on every rank.",
    ),
    Change(
        'f"random_{rank}.pt"',
        '"random.pt"',
        "saves-on-all-ranks",
        WRONG,
        "torch.save(torch.get_rng_state()",
        "torch.save writes 'random.pt' on every rank.",
    ),
    Change(
        "        evaluate(model, val_loader, rank)\n",
        "        if rank == 0:\n            evaluate(model.module, val_loader, rank)\n",
        "collective-on-one-rank",
        HANG,
        "dist.all_reduce(total)",
        "dist.all_reduce is for all ranks, but only those with `rank == 0` come to it, "
        "by way of evaluate() in line 51.",
    ),
    Change(
        "        if is_main_process():\n",
        "        if is_main_process():\n            dist.barrier()\n",
        "collective-on-one-rank",
        HANG,
        "            dist.barrier()",
        "dist.barrier is for all ranks, but only those with `is_main_process()` come to it.",
    ),
    Change(
        "    dist.destroy_process_group()\n",
        "    if rank > 0:\n        return\n    dist.broadcast(x, 0)\n",
        "collective-on-one-rank",
        HANG,
        "dist.broadcast(x, 0)",
        "dist.broadcast is for all ranks, but only those with `not (rank > 0)` come to it.",
    ),
]
"""One finding each."""
