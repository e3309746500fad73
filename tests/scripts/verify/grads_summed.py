"""Error: the gradients are summed over the ranks by hand and never divided by their number."""
# EXPECT: gradients are summed over the ranks and not averaged

# Following the "Writing Distributed Applications with PyTorch" tutorial.
import os
from math import ceil
from random import Random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Subset


class DataPartitioner:
    def __init__(self, data, num_parts, seed=1234):
        indexes = list(range(len(data)))
        Random(seed).shuffle(indexes)
        self.data = data
        self.partitions = [indexes[i::num_parts] for i in range(num_parts)]

    def use(self, partition):
        return Subset(self.data, self.partitions[partition])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3)
        self.fc1 = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        return F.log_softmax(self.fc1(x.flatten(1)), dim=1)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)


def run(rank, size):
    torch.manual_seed(1234)
    images = torch.randn(256, 1, 8, 8)
    labels = (images[:, 0, :4].mean(dim=(1, 2)) * 20 + 5).clamp(0, 9).long()
    bsz = int(32 / float(size))
    partition = DataPartitioner(list(zip(images, labels, strict=True)), size).use(rank)
    train_set = DataLoader(partition, batch_size=bsz, shuffle=False)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    num_batches = ceil(len(train_set.dataset) / float(bsz))
    for epoch in range(2):
        epoch_loss = torch.zeros(1)
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            epoch_loss += loss.detach()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print("Epoch", epoch, ":", epoch_loss.item() / size / num_batches)


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
