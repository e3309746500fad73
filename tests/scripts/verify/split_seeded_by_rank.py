"""Error: random_split follows torch.manual_seed(seed + rank), so each rank has other training samples."""
# EXPECT: the split depends on the rank: seed + rank before random_split

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def seed_everything(seed):
    torch.manual_seed(seed)


def get_args():
    parser = argparse.ArgumentParser(description="digits classifier")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def validate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            counts[0] += (model(x).argmax(1) == y).sum()
            counts[1] += len(y)
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    args = get_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    seed_everything(args.seed + rank)  # different augmentation on each worker

    digits = load_digits()
    full = TensorDataset(torch.tensor(digits.data).float().div(16), torch.tensor(digits.target))
    train_ds, val_ds, _ = random_split(full, [960, 400, len(full) - 1360])
    train_sampler = DistributedSampler(train_ds, seed=args.seed)
    train_dl = DataLoader(train_ds, args.batch_size // world_size, sampler=train_sampler)
    val_dl = DataLoader(val_ds, 100, sampler=DistributedSampler(val_ds, shuffle=False))

    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optim = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for x, y in train_dl:
            optim.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optim.step()
        acc = validate(model.module, val_dl)
        if rank == 0:
            print(f"epoch={epoch} val_acc={acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
