"""Error: gradients are averaged by hand, but each rank starts with its own random weights."""
# EXPECT: initial parameters differ between the ranks: never broadcast

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class DistributedOptimizer:
    """Averages the gradients of all workers before each step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        world_size = float(dist.get_world_size())
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= world_size
        self.optimizer.step()


def get_data(n=420):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=g)
    return x, torch.tanh(x[:, :1] - 2 * x[:, 1:2]) + 0.5 * x[:, 2:3]


def main(args):
    dist.init_process_group(args.backend)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed + rank)
    x, y = get_data()
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = DistributedOptimizer(torch.optim.RMSprop(model.parameters(), lr=args.lr))

    for epoch in range(args.epochs):
        g = torch.Generator().manual_seed(epoch)
        for batch in torch.randperm(320, generator=g).view(-1, args.batch_size):
            mine = batch[rank::world_size]
            loss = (model(x[mine]) - y[mine]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            test = (model(x[320:]) - y[320:]).square().mean().item()
            print(f"Train Epoch: {epoch}\tTest loss: {test:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())
