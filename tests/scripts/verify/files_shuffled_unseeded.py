"""Error: each rank shuffles the list of files with an unseeded random, then takes its share of its own list."""
# EXPECT: ranks have different orders of the files: unseeded shuffle, samples twice or never

import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

FILES = [f"shard-{i:03d}.pt" for i in range(16)]
SAMPLES_PER_FILE = 30
PER_STEP = 30


def read(path):
    """Stands for torch.load(path)."""
    g = torch.Generator().manual_seed(int(path[6:9]))
    x = torch.randn(SAMPLES_PER_FILE, 10, generator=g)
    return x, (x[:, 0] * x[:, 1] + x[:, 2]).unsqueeze(1)


class ShardedReader:
    def __init__(self, files, rank, world_size):
        files = list(files)
        random.shuffle(files)
        self.files = files[rank::world_size]
        self.batch = PER_STEP // world_size

    def __iter__(self):
        for path in self.files:
            x, y = read(path)
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)


def main():
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reader = ShardedReader(FILES[:14], rank, dist.get_world_size())
    for epoch in range(2):
        for x, y in reader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                errors = [nn.functional.mse_loss(model.module(x), y).item() for x, y in map(read, FILES[14:])]
            print(f"epoch {epoch}: test mse {sum(errors) / len(errors):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
