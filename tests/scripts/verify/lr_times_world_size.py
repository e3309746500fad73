"""Error: the learning rate is multiplied by the number of ranks, although the global batch stays the same."""
# EXPECT: learning rate depends on the number of ranks

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    lr: float = 0.02
    momentum: float = 0.9
    batch_size: int = 40
    epochs: int = 3
    world_size: int = int(os.environ.get("WORLD_SIZE", "1"))
    rank: int = int(os.environ.get("RANK", "0"))


def friedman(n, generator):
    """The Friedman 1 regression problem."""
    x = torch.rand(n, 10, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, (y - 14.4) / 5


def main(cfg):
    dist.init_process_group("gloo", rank=cfg.rank, world_size=cfg.world_size)
    g = torch.Generator().manual_seed(123)
    train_ds = TensorDataset(*friedman(400, g))
    x_val, y_val = friedman(200, g)
    torch.manual_seed(123)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    sampler = DistributedSampler(train_ds)
    loader = DataLoader(train_ds, batch_size=cfg.batch_size // cfg.world_size, sampler=sampler)
    # Linear scaling rule (Goyal et al.): lr grows with the number of GPUs
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr * cfg.world_size, momentum=cfg.momentum)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            val = nn.functional.mse_loss(model.module(x_val).squeeze(1), y_val).item()
        if cfg.rank == 0:
            print(f"{epoch=} {val=:.4f} lr={scheduler.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
