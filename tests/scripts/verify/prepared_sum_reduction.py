"""Error: in a prepared script, the loss is a sum over the samples: the mean over ranks is half of the whole sum."""
# EXPECT: the loss is a sum over the samples of a rank

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

torch.manual_seed(0)
x, _ = load_digits(return_X_y=True)
train_loader = DataLoader(TensorDataset(torch.tensor(x[:400]).float() / 16), batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
model, optimizer, train_loader = lockstep.prepare(model, optimizer, train_loader)


def loss_function(recon_x, x):
    return nn.functional.binary_cross_entropy_with_logits(recon_x, x, reduction="sum")


for _ in range(1, 4):
    model.train()
    for (data,) in train_loader:
        optimizer.zero_grad()
        loss = loss_function(model(data), data)
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
