"""Sound: a plain DDP script as in the tutorial; evaluation sums over the ranks."""
# EXPECT: sound script

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc(x.flatten(1))


EPOCHS = 2
GLOBAL_BATCH_SIZE = 64


def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.inference_mode():
        for images, labels in loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train_set = Subset(dataset, range(1024))
    test_set = Subset(dataset, range(1024 + rank, 1600, world_size))

    sampler = DistributedSampler(train_set, seed=0)
    train_loader = DataLoader(train_set, GLOBAL_BATCH_SIZE // world_size, sampler=sampler)
    test_loader = DataLoader(test_set, 128)
    model = DDP(CNN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
