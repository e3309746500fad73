"""Error: the loss is divided by the number of ranks, although DDP already averages the gradients."""
# EXPECT: gradients are divided by the number of ranks twice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import lockstep

GLOBAL_BATCH = 32


class Regressor(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


def make_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, y)


with lockstep.init() as world:
    torch.manual_seed(0)
    train, valid = make_dataset(320, 1), make_dataset(100, 2)
    model = lockstep.DistributedDataParallel(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = lockstep.DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=GLOBAL_BATCH // world.world_size, sampler=sampler)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = mse_loss(model(x), y) / world.world_size  # average over the workers
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        xs, ys = (t[world.rank :: world.world_size] for t in valid.tensors)
        with torch.no_grad():
            stats = torch.stack([(model.module(xs) - ys).square().sum(), torch.tensor(float(len(ys)))])
        dist.all_reduce(stats)
        world.print(f"epoch {epoch}  valid mse {(stats[0] / stats[1]).item():.4f}")
