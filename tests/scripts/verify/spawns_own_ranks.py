"""Sound: starts its own ranks by mp.spawn if no launcher has, as the multi-GPU tutorial does."""
# EXPECT: sound script

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        g = torch.Generator().manual_seed(size)
        self.data = [(torch.rand(20, generator=g), torch.rand(1, generator=g)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def ddp_setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12357")
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)


def main(rank, world_size, total_epochs, batch_size):
    ddp_setup(rank, world_size)
    torch.manual_seed(0)
    dataset = MyTrainDataset(256)
    model = DDP(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(dataset)
    train_data = DataLoader(dataset, batch_size=batch_size // world_size, shuffle=False, sampler=sampler)
    for epoch in range(total_epochs):
        train_data.sampler.set_epoch(epoch)
        for source, targets in train_data:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(source), targets)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"Epoch {epoch} norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 3, 32)
    else:
        world_size = max(2, torch.cuda.device_count())
        mp.spawn(main, args=(world_size, 3, 32), nprocs=world_size)
