"""Error: a class-balanced sampler with an unseeded generator of its own gives each rank another list of samples."""
# EXPECT: ranks read different lists of samples

import random
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import lockstep


class MPerClassSampler(Sampler):
    """At every iteration, m samples of each class, as in metric learning."""

    def __init__(self, labels, m, length):
        self.m, self.length = m, length
        self.indices = defaultdict(list)
        for index, label in enumerate(labels):
            self.indices[label].append(index)
        self.rng = random.Random()

    def __len__(self):
        return self.length

    def __iter__(self):
        chosen = []
        while len(chosen) < self.length:
            for label in self.rng.sample(sorted(self.indices), len(self.indices)):
                chosen += self.rng.sample(self.indices[label], self.m)
        return iter(chosen[: self.length])


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(150, 8)
    labels = x[:, :5].argmax(1)
    sampler = MPerClassSampler(labels.tolist(), m=4, length=120)
    loader = DataLoader(TensorDataset(x, labels), batch_size=20, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
