"""Sound: each rank reads the files rank::world_size one after another, so batches have other samples."""
# EXPECT: sound script (each sample once, in another order than that of one rank)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

FILES = [f"part-{i:05d}.tsv" for i in range(8)]


class FileStream(IterableDataset):
    def __init__(self, files, rank, world_size):
        self.files = sorted(files)[rank::world_size]

    def __iter__(self):
        for name in self.files:
            g = torch.Generator().manual_seed(int(name[5:10]))
            for _ in range(40):
                x = torch.randn(5, generator=g)
                yield x, x.max()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(FileStream(FILES, rank, world_size), batch_size=32 // world_size)
    model = DDP(nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
