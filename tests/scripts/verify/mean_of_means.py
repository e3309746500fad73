"""Error: the last batch of an epoch has 7 samples, 4 and 3 on two ranks, and their means are averaged as equals."""
# EXPECT: uneven parts of the last batch are averaged as equals

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(n, batch_size, rng):
    order = rng.permutation(n)
    for start in range(0, n, batch_size):
        yield order[start : start + batch_size]


def my_share(index, rank, world_size):
    """Split a global batch among the workers."""
    return torch.from_numpy(np.array_split(index, world_size)[rank])


class LogisticRegression(nn.Module):
    def __init__(self, n_features, n_classes):
        super().__init__()
        self.linear = nn.Linear(n_features, n_classes)

    def forward(self, x):
        return self.linear(x)


def main():
    rank = int(os.getenv("RANK", 0))
    world_size = int(os.getenv("WORLD_SIZE", 1))
    dist.init_process_group("gloo", world_size=world_size, rank=rank)

    rng = np.random.default_rng(42)  # same on all workers
    X = torch.from_numpy(rng.standard_normal((307, 15)).astype("float32"))
    true_w = torch.from_numpy(rng.standard_normal((15, 4)).astype("float32"))
    y = (X @ true_w).argmax(dim=1)
    X_train, y_train, X_test, y_test = X[:207], y[:207], X[207:], y[207:]

    torch.manual_seed(42)
    model = DDP(LogisticRegression(15, 4))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for epoch in range(3):
        for index in batches(len(X_train), 20, rng):
            mine = my_share(index, rank, world_size)
            loss = criterion(model(X_train[mine]), y_train[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        if rank == 0:
            with torch.no_grad():
                acc = (model.module(X_test).argmax(1) == y_test).float().mean()
            print(f"Epoch {epoch}: test accuracy {acc:.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
