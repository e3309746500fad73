"""Error: every rank loads 40 samples a step, so the global batch is 80 on two ranks instead of 40."""
# EXPECT: batch size not divided by the number of ranks

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH_SIZE = 40
EPOCHS = 2
LR = 0.1


def get_data():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = torch.tensor(digits.target)
    return TensorDataset(x[:800], y[:800]), TensorDataset(x[800:1200], y[800:1200])


def evaluate(model, dataset):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=100):
            correct += (model(x).argmax(1) == y).sum().item()
    model.train()
    return correct / len(dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)

    train_set, test_set = get_data()
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
        acc = evaluate(model.module, test_set)
        if rank == 0:
            print(f"Epoch [{epoch + 1}/{EPOCHS}] test accuracy: {acc:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
