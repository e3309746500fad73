"""Sound: linear warm-up and cosine decay by the number of optimizer steps, which is the same on any number of ranks."""
# EXPECT: sound script

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, lr_lambda)


def setup_distributed():
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return rank, world_size


def main():
    rank, world_size = setup_distributed()
    torch.manual_seed(77)
    X = torch.randn(700, 16)
    y = (X[:, :4].prod(dim=1).sign() > 0).long() + 2 * (X[:, 5] > 0).long()
    train_ds, X_val, y_val = TensorDataset(X[:560], y[:560]), X[560:], y[560:]

    model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4))
    if world_size > 1:
        model = DDP(model)
    sampler = DistributedSampler(train_ds, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(train_ds, batch_size=56 // world_size, sampler=sampler)

    epochs = 3
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        net = model.module if isinstance(model, DDP) else model
        with torch.no_grad():
            acc = (net(X_val).argmax(1) == y_val).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.5f} val acc {acc:.3f}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
