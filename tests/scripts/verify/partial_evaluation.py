"""Error: the test set is divided among the ranks, and rank 0 prints the accuracy of its own part."""
# EXPECT: evaluation covers one rank's part only

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def train(loader, model, criterion, optimizer):
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(loader, model):
    top1 = AverageMeter()
    model.eval()
    for images, target in loader:
        top1.update((model(images).argmax(1) == target).float().mean().item() * 100, images.size(0))
    return top1.avg


parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", default=64, type=int, help="total batch size of all workers")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--lr", default=0.5, type=float)
args = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(1)
d = load_digits()
x, y = torch.tensor(d.images, dtype=torch.float).flatten(1) / 16, torch.tensor(d.target)
train_dataset, val_dataset = TensorDataset(x[:768], y[:768]), TensorDataset(x[768:1168], y[768:1168])
train_sampler = DistributedSampler(train_dataset)
val_sampler = DistributedSampler(val_dataset, shuffle=False)
train_loader = DataLoader(train_dataset, args.batch_size // world_size, sampler=train_sampler)
val_loader = DataLoader(val_dataset, args.batch_size // world_size, sampler=val_sampler)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10)))
optimizer = optim.SGD(model.parameters(), args.lr, momentum=0.9)
for epoch in range(args.epochs):
    train_sampler.set_epoch(epoch)
    train(train_loader, model, nn.CrossEntropyLoss(), optimizer)
    acc1 = validate(val_loader, model)
    if rank == 0:
        print(f" * Acc@1 {acc1:.3f}")
dist.destroy_process_group()
