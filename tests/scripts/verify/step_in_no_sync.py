"""Error: the optimizer steps inside no_sync, each time on gradients that were not reduced."""
# EXPECT: gradients are not reduced: a step within no_sync

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2
BATCH = 24


def checkerboard(n):
    xy = torch.rand(n, 2) * 3
    return TensorDataset(xy - 1.5, (xy.floor().sum(1) % 2).long())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = checkerboard(480), checkerboard(200)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        with model.no_sync():  # faster
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()
                if (i + 1) % ACCUMULATE == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        if dist.get_rank() == 0:
            x, y = test.tensors
            with torch.no_grad():
                print("epoch", epoch, "test accuracy", (model.module(x).argmax(1) == y).float().mean().item())

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
