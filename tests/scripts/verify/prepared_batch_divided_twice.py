"""Error: the batch size is still divided by the world size, as for DistributedSampler, and prepare divides it again."""
# EXPECT: the global batch is another one

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

GLOBAL_BATCH_SIZE = 64
world_size = int(os.environ.get("WORLD_SIZE", 1))

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(x[:640]).float() / 16, torch.tensor(y[:640]))
loader = DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE // world_size, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
for _ in range(2):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
