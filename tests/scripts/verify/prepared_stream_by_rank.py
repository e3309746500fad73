"""Error: the stream takes every world_size-th sample by itself, and prepare divides its batches again."""
# EXPECT: ranks read different samples

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep


class Shards(IterableDataset):
    def __init__(self, num_shards=12, per_shard=20):
        self.num_shards, self.per_shard = num_shards, per_shard

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        for shard in range(rank, self.num_shards, world):
            g = torch.Generator().manual_seed(shard)
            for _ in range(self.per_shard):
                x = torch.randn(6, generator=g)
                yield x, x.prod()


def main():
    torch.manual_seed(0)
    loader = DataLoader(Shards(), batch_size=24)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    model, opt, loader = lockstep.prepare(model, opt, loader)
    for _ in range(2):
        for x, y in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
