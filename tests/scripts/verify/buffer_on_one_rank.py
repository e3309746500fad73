"""Error: a buffer that the model uses is updated on rank 0 only, with broadcast_buffers=False."""
# EXPECT: buffer changed on one rank only

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo", init_method="env://")


class CenteredMLP(nn.Module):
    """Subtracts a running mean of the inputs, DINO style."""

    def __init__(self, dim, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running", torch.zeros(dim))
        self.layers = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.layers(x - self.running)


torch.manual_seed(11)
centers = torch.randn(3, 12) * 1.5 + 1
labels = torch.randint(0, 3, (480,))
points = centers[labels] + torch.randn(480, 12)
x_test, y_test = points[360:], labels[360:]

model = DDP(CenteredMLP(12), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
bs = 36 // world_size

for epoch in range(2):
    order = torch.randperm(360, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
    for i in range(0, len(order), bs):
        idx = order[i : i + bs]
        out = model(points[idx])
        loss = nn.functional.cross_entropy(out, labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_mean = points[idx].mean(0)
        dist.all_reduce(batch_mean)
        if rank == 0:
            m = model.module
            m.running.add_(m.momentum * (batch_mean / world_size - m.running))
    if rank == 0:
        with torch.no_grad():
            print(epoch, "test acc:", (model.module(x_test).argmax(1) == y_test).float().mean().item())

dist.destroy_process_group()
