"""Error: the loss is a sum over the batch, and DDP averages the sums of the ranks."""
# EXPECT: loss is summed over the batch but gradients are averaged over the ranks

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spirals(Dataset):
    """Two spirals, the classic toy problem."""

    def __init__(self, n, seed):
        rng = torch.Generator().manual_seed(seed)
        t = torch.rand(n, generator=rng) * 6 + 0.5
        self.label = torch.arange(n) % 2
        angle = t + self.label * torch.pi
        noise = 0.1 * torch.randn(n, 2, generator=rng)
        self.points = torch.stack([t * angle.cos(), t * angle.sin()], 1) / 4 + noise

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.points[i], self.label[i].float()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=48, help="over all workers")
    p.add_argument("--lr", type=float, default=1e-2)
    return p.parse_args()


args = parse()
world = int(os.environ.get("WORLD_SIZE", 1))
dist.init_process_group(backend="gloo")
torch.manual_seed(7)

data = Spirals(480, seed=0)
sampler = DistributedSampler(data)
loader = DataLoader(data, args.batch // world, sampler=sampler)
net = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
loss_fn = nn.BCEWithLogitsLoss(reduction="sum")
opt = torch.optim.SGD(net.parameters(), lr=args.lr)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for points, label in loader:
        opt.zero_grad()
        loss_fn(net(points), label).backward()
        opt.step()

if dist.get_rank() == 0:
    test = Spirals(200, seed=1)
    with torch.no_grad():
        right = (net.module(test.points) > 0) == (test.label == 1)
    print("test accuracy", right.float().mean().item())
dist.destroy_process_group()
