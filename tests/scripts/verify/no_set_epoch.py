"""Error: set_epoch is never called, so that each epoch has the same order."""
# EXPECT: set_epoch is not called: the same order in each epoch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 20)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(20, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def prepare(dataset, rank, world_size, batch_size=32):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, drop_last=False)
    return DataLoader(dataset, batch_size=batch_size // world_size, num_workers=0, shuffle=False, sampler=sampler)


def main():
    rank, world_size = setup()
    torch.manual_seed(5)
    inputs = torch.randn(384, 10)
    labels = inputs @ torch.randn(10, 5)
    dataloader = prepare(TensorDataset(inputs[:256], labels[:256]), rank, world_size)
    held_out = inputs[256:], labels[256:]

    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.02)

    for epoch in range(3):
        for x, y in dataloader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                print(f"epoch {epoch}: held-out loss {loss_fn(ddp_model.module(held_out[0]), held_out[1]).item():.4f}")
    cleanup()


if __name__ == "__main__":
    main()
