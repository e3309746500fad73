"""Error: each rank standardises its part of the data by the mean and deviation of that part."""
# EXPECT: samples differ between one rank and many: normalised by each rank's own statistics

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
if not dist.is_initialized():
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


# house prices, as in the course
def load_table(rows=360):
    rng = np.random.RandomState(0)
    area = rng.gamma(5.0, 20.0, rows)
    rooms = np.round(area / 25 + rng.rand(rows) * 2)
    age = rng.exponential(20, rows)
    price = 3 * area + 20 * rooms - 0.5 * age + rng.randn(rows) * 10
    return np.stack([area, rooms, age], 1).astype(np.float32), (price / 300).astype(np.float32)


features, price = load_table()
test_x, test_y = features[300:], price[300:]
# every worker keeps its rows only
features, price = features[:300][rank::world_size], price[:300][rank::world_size]
mean, std = features.mean(axis=0), features.std(axis=0)
X = torch.from_numpy((features - mean) / std)
y = torch.from_numpy(price)[:, None]

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
net = nn.parallel.DistributedDataParallel(net)
loss_fn = nn.L1Loss()
opt = torch.optim.SGD(net.parameters(), lr=0.03)
batch = 30 // world_size

for _epoch in range(3):
    for start in range(0, len(X), batch):
        opt.zero_grad()
        loss = loss_fn(net(X[start : start + batch]), y[start : start + batch])
        loss.backward()
        opt.step()

if rank == 0:
    with torch.no_grad():
        pred = net.module(torch.from_numpy((test_x - mean) / std)).squeeze(1).numpy()
    print(f"mean absolute error {np.abs(pred - test_y).mean() * 300:.2f} thousand")
dist.destroy_process_group()
