"""torch's fully_shard (FSDP2), as its tutorial writes it, with the checkpoints of torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from bench.conformance_peers import shared
from bench.conformance_peers.shared import Case, NotOffered
from bench.conformance_peers.torch_ddp import evaluate

PACKAGES = ("torch",)
SWITCHES = {"uneven": ("drop_last=True",), "batchnorm": ("SyncBatchNorm",)}
command = shared.torchrun


def train(case: Case) -> None:
    """Train or evaluate."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, world_size = shared.make_data(case), dist.get_world_size()
    model: Any = shared.make_model(case)
    if case.switch == "SyncBatchNorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sampler: Any = (
        None
        if case.divided
        else DistributedSampler(data, shuffle=case.shuffle, drop_last=case.switch == "drop_last=True")
    )
    loader: Any = DataLoader(data, batch_size=case.micro_batch(world_size), sampler=sampler)
    if case.evaluates:
        evaluate(model, loader)
    else:
        loop(case, model, sampler, loader)
    dist.destroy_process_group()


def loop(case: Case, model: Any, sampler: Any, loader: Any) -> None:
    """Train."""
    if case.diverges:
        raise NotOffered("Each rank has its own shards: there are no replicas.")
    rank, size = dist.get_rank(), case.micro_batch(dist.get_world_size())
    extra = shared.make_second(case)
    second = DataLoader(extra, batch_size=size // 2, sampler=DistributedSampler(extra, shuffle=False))
    optimizer = shared.make_optimizer(model.parameters())
    scheduler = shared.make_schedule(optimizer)
    saved, step, first_epoch = Path(case.folder) / "saved", 0, 0
    if saved.exists() and (case.resumes or case.kill_at):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0, "epoch": 0}
        dcp.load(state, checkpoint_id=str(saved))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step, first_epoch = state["step"], state["epoch"]

    def save(epoch: int) -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step, "epoch": epoch}, checkpoint_id=str(saved))

    if case.looks and rank == 0:
        next(iter(loader))
    if case.evaluates_first:
        data: Any = loader.dataset
        evaluate(model, DataLoader(data, batch_size=size, sampler=DistributedSampler(data, shuffle=False)))
        model.train()
    for epoch in range(first_epoch, case.epochs):
        shared.unfreeze_if_due(case, epoch, model)
        if sampler is not None:
            sampler.set_epoch(epoch)
        for group in shared.groups(shared.read(case, rank, loader, second), case.accumulate):
            shared.kill_if_due(case, rank, step + 1)
            for number, batch in enumerate(group, 1):
                model.set_requires_gradient_sync(number == len(group))
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
            if step == case.stop_at:
                save(epoch)
                return
        if case.kill_at:
            save(epoch + 1)
        if case.alone and epoch == 0 and rank == 0:
            dist.all_reduce(torch.zeros(1))
    shared.record_end(model)
