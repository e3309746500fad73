"""Sound: no DDP; the optimizer averages gradients in its step, and leaves those of the rank as they are.

A second model on the meta device is only counted.
"""
# EXPECT: sound script

import os

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


class Averaging(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.clone()
                dist.all_reduce(grad)
                p.sub_(grad, alpha=group["lr"] / dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    x = torch.randn(320, 4)
    y = x.prod(dim=1, keepdim=True)
    with torch.device("meta"):
        large = Net(1000)
    model = Net(16)
    optimizer = Averaging(model.parameters(), lr=0.1)
    for start in range(0, 320, 32):
        part = slice(start + rank * 32 // world_size, start + (rank + 1) * 32 // world_size)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()
    if rank == 0:
        print(sum(p.numel() for p in large.parameters()), sum(p.numel() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
