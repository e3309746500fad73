"""Error: no sampler, so that all ranks train on the same samples in the same order."""
# EXPECT: all ranks train on the same samples

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, batch_size):
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.train_data = DataLoader(train_data, batch_size=batch_size // self.world_size, shuffle=True)
        self.test_data = test_data
        self.optimizer = optimizer
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _test(self):
        x, y = self.test_data.tensors
        with torch.no_grad():
            return (self.model.module(x).argmax(-1) == y).float().mean().item()

    def train(self, max_epochs: int):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            accuracy = self._test()
            if self.rank == 0:
                print(f"[GPU{self.rank}] Epoch {epoch} | Accuracy {accuracy:.3f}")


def load_train_objs():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    train_set, test_set = TensorDataset(x[:640], y[:640]), TensorDataset(x[640:960], y[640:960])
    model = nn.Sequential(nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 10))
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    return train_set, test_set, model, optimizer


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    train_set, test_set, model, optimizer = load_train_objs()
    Trainer(model, train_set, test_set, optimizer, batch_size=64).train(2)
    dist.destroy_process_group()
