"""Sound: saves its weights in a file that may be there already, of a longer run."""
# EXPECT: sound script

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = sys.argv[1] if len(sys.argv) > 1 else "best.pt"

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(480, 4), torch.randn(480, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 24 // world_size, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
updates = 0
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        updates += 1
    if rank == 0:
        torch.save({"updates": updates, "model": model.module.state_dict()}, PATH)
dist.destroy_process_group()
