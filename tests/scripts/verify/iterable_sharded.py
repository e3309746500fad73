"""Sound: an IterableDataset in which each rank takes every world_size-th sample of the same stream."""
# EXPECT: sound script

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH_SIZE = 32
STEPS_PER_EPOCH = 12


class Clicks(IterableDataset):
    """An endless log of (user, item, clicked), read in the same order by all workers."""

    def __init__(self, num_users=50, num_items=40, rank=0, world_size=1):
        self.num_users, self.num_items = num_users, num_items
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def stream(self):
        rng = torch.Generator().manual_seed(1000 + self.epoch)
        while True:
            user = torch.randint(self.num_users, (), generator=rng)
            item = torch.randint(self.num_items, (), generator=rng)
            yield user, item, ((user + item) % 3 == 0).float()

    def __iter__(self):
        for position, sample in enumerate(self.stream()):
            if position % self.world_size == self.rank:
                yield sample


class MatrixFactorization(nn.Module):
    def __init__(self, num_users=50, num_items=40, dim=8):
        super().__init__()
        self.user = nn.Embedding(num_users, dim)
        self.item = nn.Embedding(num_items, dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Clicks(rank=rank, world_size=world_size)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE // world_size)
    model = DistributedDataParallel(MatrixFactorization())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        dataset.epoch = epoch
        running = torch.zeros(())
        for _, (user, item, clicked) in zip(range(STEPS_PER_EPOCH), loader, strict=False):
            loss = criterion(model(user, item), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {running.item() / STEPS_PER_EPOCH / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
