"""Error: set_seed(device_specific=True) comes before random_split, so that each rank has another split."""
# EXPECT: the split depends on the rank: seed + rank before random_split

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset, random_split


class Classifier(torch.nn.Module):
    def __init__(self, hidden: int = 32):
        super().__init__()
        self.lin1 = torch.nn.Linear(8, hidden)
        self.lin2 = torch.nn.Linear(hidden, 3)

    def forward(self, x):
        return self.lin2(F.relu(self.lin1(x)))


def iris_like(n=600):
    g = torch.Generator().manual_seed(9)
    y = torch.randint(3, (n,), generator=g)
    return TensorDataset(torch.randn(n, 8, generator=g) + y[:, None] * torch.linspace(-1, 1, 8), y)


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--global_batch", type=int, default=48)
args = parser.parse_args()

accelerator = Accelerator(cpu=True)
set_seed(args.seed, device_specific=True)
train_set, val_set = random_split(iris_like(), [480, 120])
batch_size = args.global_batch // accelerator.num_processes
train_loader = DataLoader(train_set, batch_size=batch_size)  # already in random order
val_loader = DataLoader(val_set, batch_size=60)

model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

for epoch in range(args.epochs):
    for x, y in train_loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    hits = []
    with torch.no_grad():
        for x, y in val_loader:
            hits.append(accelerator.gather_for_metrics(model(x).argmax(-1) == y))
    accelerator.print(f"epoch {epoch} val acc {torch.cat(hits).float().mean().item():.3f}")
accelerator.end_training()
