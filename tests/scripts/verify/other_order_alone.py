"""Sound: the usual `if distributed` of PyTorch's examples, so that one rank alone shuffles in another order."""
# EXPECT: sound script (one rank alone has another order of samples)

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
import torch.utils.data
import torch.utils.data.distributed
from sklearn.datasets import load_digits


def main_worker(args):
    args.distributed = args.world_size > 1
    if args.distributed:
        dist.init_process_group(backend=args.dist_backend, world_size=args.world_size, rank=args.rank)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
        args.batch_size = int(args.batch_size / args.world_size)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), args.lr, momentum=0.9)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train_dataset = torch.utils.data.TensorDataset(x[:800], y[:800])
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset) if args.distributed else None
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None), sampler=train_sampler
    )

    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if args.rank == 0:
            net = model.module if args.distributed else model
            with torch.no_grad():
                acc1 = (net(x[800:1200]).argmax(1) == y[800:1200]).float().mean()
            print(f" * Acc@1 {100 * acc1:.3f}")
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PyTorch Training")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch-size", default=80, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--world-size", default=int(os.environ.get("WORLD_SIZE", 1)), type=int)
    parser.add_argument("--rank", default=int(os.environ.get("RANK", 0)), type=int)
    main_worker(parser.parse_args())
