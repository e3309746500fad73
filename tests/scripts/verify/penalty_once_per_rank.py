"""Error: losses are divided by the global batch and gradients summed, so the L2 penalty is added once on each rank."""
# EXPECT: weight penalty is counted once per rank

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

GLOBAL_BATCH = 50
L2 = 1e-3


def l2_penalty(model):
    return sum(p.pow(2).sum() for name, p in model.named_parameters() if "weight" in name)


def reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)  # SUM: the loss is already divided by the global batch size


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 30)
        self.out = nn.Linear(30, 10)

    def forward(self, x):
        return self.out(self.hidden(x).tanh())


def step(model, opt, x, y):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y, reduction="sum") / GLOBAL_BATCH
    loss = loss + L2 * l2_penalty(model)
    loss.backward()
    reduce_gradients(model)
    opt.step()


def main():
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X).float() / 16, torch.tensor(y)
    model = Softmax()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    gen = torch.Generator().manual_seed(2)
    for epoch in range(2):
        for batch in torch.randperm(700, generator=gen).split(GLOBAL_BATCH):
            mine = batch[rank::size]
            step(model, opt, X[mine], y[mine])
        if rank == 0:
            with torch.no_grad():
                print(epoch, f"acc {(model(X[700:1100]).argmax(1) == y[700:1100]).float().mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
