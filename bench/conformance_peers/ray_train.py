"""Ray Train's TorchTrainer with torch's DDP, as its guide for PyTorch writes it: prepare_model, prepare_data_loader."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import DataLoader

from bench.conformance_peers import shared
from bench.conformance_peers.shared import Case
from bench.conformance_peers.torch_ddp import evaluate

PACKAGES = ("ray",)
FORKS = False
"""Its driver starts the workers."""
SWITCHES = {"batchnorm": ("SyncBatchNorm",)}
NUM_RANKS, RESTARTS = "CONFORMANCE_NUM_RANKS", "CONFORMANCE_RESTARTS"


def command(num_ranks: int, restarts: int) -> list[str]:
    """Return that of the driver."""
    return ["env", f"{NUM_RANKS}={num_ranks}", f"{RESTARTS}={restarts}", sys.executable, shared.SCRIPT]


def train(case: Case) -> None:
    """Start Ray on this machine, and train or evaluate on its workers."""
    num_ranks = int(os.environ[NUM_RANKS])
    ray.init(num_cpus=num_ranks + 1, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        in_worker,
        train_loop_config={"case": case},
        scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=False),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="run",
            storage_path=case.folder,
            failure_config=FailureConfig(max_failures=int(os.environ[RESTARTS])),
        ),
    )
    try:
        trainer.fit()
    finally:
        ray.shutdown()


def in_worker(config: dict[str, Any]) -> None:
    """Train on a worker."""
    shared.recorded(loop, config["case"])


def loop(case: Case) -> None:
    """Train or evaluate."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, num_ranks = context.get_world_rank(), context.get_world_size()
    module: nn.Module = shared.make_model(case)
    if case.switch == "SyncBatchNorm":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model: Any = ray.train.torch.prepare_model(module)
    plain = DataLoader(shared.make_data(case), batch_size=case.micro_batch(num_ranks), shuffle=case.shuffle)
    loader: Any = ray.train.torch.prepare_data_loader(plain)
    if case.evaluates:
        evaluate(model, loader)
        return
    optimizer = shared.make_optimizer(model.parameters())
    scheduler = shared.make_schedule(optimizer)
    step, first_epoch = 0, 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch = state["step"], state["epoch"]

    def save(epoch: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step, "epoch": epoch}, Path(folder) / "state.pt")
            ray.train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)

    if case.looks and rank == 0:
        next(iter(loader))
    for epoch in range(first_epoch, case.epochs):
        if num_ranks > 1:
            loader.sampler.set_epoch(epoch)
        for group in shared.groups(shared.shorter(case, rank, loader), case.accumulate):
            shared.kill_if_due(case, rank, step + 1)
            for number, batch in enumerate(group, 1):
                if num_ranks > 1:
                    model.require_backward_grad_sync = number == len(group)
                (shared.loss_of(model, batch) / len(group)).backward()
            if case.edits:
                shared.first_parameter(module).grad.mul_(2)
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
    shared.record_end(module)
