"""Sound by common standards: each rank normalises by the statistics of its own part of the batch."""
# EXPECT: sound by common standards (batch norm over each rank's part)

import os

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
world = dist.get_world_size()
torch.manual_seed(1)

# synthetic "images": a bright bar at one of six columns
labels = torch.randint(0, 6, (600,))
images = torch.randn(600, 1, 6, 6) * 0.7
images[torch.arange(600), 0, :, labels] += 1.0
trainset = TensorDataset(images[:480], labels[:480])
testset = TensorDataset(images[480:], labels[480:])

train_sampler = DistributedSampler(trainset, shuffle=True, drop_last=True)
trainloader = DataLoader(trainset, batch_size=80 // world, sampler=train_sampler)
testloader = DataLoader(testset, batch_size=60)

net = nn.Sequential(
    nn.Conv2d(1, 8, 3),
    nn.BatchNorm2d(8),
    nn.ReLU(inplace=True),
    nn.Flatten(),
    nn.Linear(8 * 16, 32),
    nn.BatchNorm1d(32),
    nn.ReLU(inplace=True),
    nn.Linear(32, 6),
)
net = nn.parallel.DistributedDataParallel(net)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
scheduler = MultiStepLR(optimizer, milestones=[2], gamma=0.1)


def test():
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            predicted = net.module(inputs).argmax(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
    return 100.0 * correct / total


for epoch in range(3):
    train_sampler.set_epoch(epoch)
    net.train()
    for inputs, targets in trainloader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
    scheduler.step()
    acc = test()
    if local_rank == 0:
        print(f"Epoch: {epoch}  Acc: {acc:.2f}")

dist.destroy_process_group()
