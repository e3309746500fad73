"""Error: a prefetcher over a loader without a sampler, so that all ranks train on the same samples."""
# EXPECT: all ranks train on the same samples

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DataPrefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        self.next_input = self.next_input.float().sub_(8).div_(16)

    def next(self):
        input, target = self.next_input, self.next_target
        if input is not None:
            self.preload()
        return input, target


def train(train_loader, model, criterion, optimizer):
    model.train()
    prefetcher = DataPrefetcher(train_loader)
    input, target = prefetcher.next()
    while input is not None:
        loss = criterion(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        input, target = prefetcher.next()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    train_dataset = TensorDataset(torch.tensor(x[:640]), torch.tensor(y[:640]))
    train_loader = DataLoader(train_dataset, 64 // dist.get_world_size(), shuffle=True)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        train(train_loader, model, nn.CrossEntropyLoss(), optimizer)
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
