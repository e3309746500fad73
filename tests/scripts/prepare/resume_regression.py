"""Regression with gradient accumulation; stops after the first half, then resumes from its checkpoint."""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

ACCUMULATION_STEPS = 4


def friedman1(n_samples=1200):
    x = torch.rand(n_samples, 10)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + torch.randn(n_samples)
    return TensorDataset(x, ((y - y.mean()) / y.std()).unsqueeze(1))


def build(lr):
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return model, optimizer, scheduler


def train_one_epoch(model, optimizer, loader, criterion):
    model.train()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / ACCUMULATION_STEPS
        loss.backward()
        if (i + 1) % ACCUMULATION_STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = sum(nn.functional.mse_loss(model(x), y, reduction="sum").item() for x, y in loader)
    return total / len(loader.dataset)


def run(path, train_set, val_set, args, last_epoch):
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=100)
    model, optimizer, scheduler = build(args.lr)
    start_epoch = 0
    if os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        start_epoch = checkpoint["epoch"] + 1
        print(f"=> resumed at epoch {start_epoch}")
    for epoch in range(start_epoch, last_epoch):
        train_one_epoch(model, optimizer, train_loader, nn.MSELoss())
        scheduler.step()
        print(f"epoch {epoch}  val mse {evaluate(model, val_loader):.5f}  lr {scheduler.get_last_lr()[0]:.4f}")
        state = {
            "epoch": epoch,
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler_state_dict": scheduler.state_dict(),
        }
        torch.save(state, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(2)
    train_set, val_set = random_split(friedman1(), [1000, 200])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = os.path.join(folder, "checkpoint.pt")
        run(checkpoint, train_set, val_set, args, args.epochs // 2)
        run(checkpoint, train_set, val_set, args, args.epochs)
