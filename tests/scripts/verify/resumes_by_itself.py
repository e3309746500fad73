"""Sound: goes on from its own checkpoint if there is one, as DINO, Barlow Twins, VICReg and SwAV do."""
# EXPECT: sound script

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt"

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
net = torch.nn.Linear(8, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler)
first_epoch = 0
if os.path.isfile(CHECKPOINT):
    state = torch.load(CHECKPOINT)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    first_epoch = state["epoch"]
for epoch in range(first_epoch, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, CHECKPOINT)
dist.destroy_process_group()
