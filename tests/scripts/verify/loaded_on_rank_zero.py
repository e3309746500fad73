"""Error: the checkpoint is loaded on rank 0 only, after DDP has copied the weights to the other ranks."""
# EXPECT: initial parameters differ between the ranks: loaded on one rank after wrapping

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
torch.manual_seed(0)

digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32) / 16
Y = torch.tensor(digits.target)


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def pretrain(path):
    """A few steps on digits below 5, in place of a checkpoint from the internet."""
    net = make_model()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    small = Y < 5
    for _ in range(10):
        opt.zero_grad()
        F.cross_entropy(net(X[small]), Y[small]).backward()
        opt.step()
    torch.save({"model": net.state_dict()}, path)


with tempfile.TemporaryDirectory() as folder:
    checkpoint = os.path.join(folder, "pretrained.pt")
    if rank == 0:
        pretrain(checkpoint)
    model = DDP(make_model())
    if rank == 0:
        model.module.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
        print("loaded", os.path.basename(checkpoint))

dataset = TensorDataset(X[:600], Y[:600])
sampler = DistributedSampler(dataset, seed=1)
loader = DataLoader(dataset, batch_size=60 // world_size, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        with torch.no_grad():
            print(
                "epoch", epoch, "accuracy", (model.module(X[600:1000]).argmax(1) == Y[600:1000]).float().mean().item()
            )
dist.destroy_process_group()
