"""Error: all ranks have the same seed while they train, so that dropout has the same masks on each of them."""
# EXPECT: the same random numbers on all ranks: dropout masks are equal

import random

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CFG = {"seed": 2024, "epochs": 2, "global_batch": 64, "lr": 2e-3, "p_drop": 0.3}


def set_seed(seed: int) -> None:
    """Reproducibility, see https://pytorch.org/docs/stable/notes/randomness.html."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 96),
        nn.ReLU(),
        nn.Dropout(CFG["p_drop"]),
        nn.Linear(96, 48),
        nn.ReLU(),
        nn.Dropout(CFG["p_drop"]),
        nn.Linear(48, 10),
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    set_seed(CFG["seed"])

    X, y = load_digits(return_X_y=True)
    X, y = torch.as_tensor(X, dtype=torch.float32) / 16, torch.as_tensor(y)
    train = TensorDataset(X[:768], y[:768])
    sampler = DistributedSampler(train, seed=CFG["seed"])
    loader = DataLoader(train, batch_size=CFG["global_batch"] // world, sampler=sampler)

    model = DDP(build_model())
    opt = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    crit = nn.CrossEntropyLoss()
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            loss = crit(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            acc = (model.module(X[768:1200]).argmax(dim=1) == y[768:1200]).float().mean()
        if rank == 0:
            print(f"epoch {epoch + 1:02d} | acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
