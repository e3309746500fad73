"""Sound: a prepared loader whose last batch has 5 samples: 3 on rank 0 and 2 on rank 1."""
# EXPECT: sound script

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import lockstep

torch.manual_seed(3)
X = torch.randn(245, 10)
y = (X[:, 0] - X[:, 1] * X[:, 2] > 0).float()
train_dl = DataLoader(TensorDataset(X, y), batch_size=48, shuffle=True)
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
opt = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
criterion = nn.BCEWithLogitsLoss()
model, opt, train_dl = lockstep.prepare(model, opt, train_dl)


def fit(epochs):
    for _ in range(epochs):
        model.train()
        for xb, yb in train_dl:
            loss = criterion(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()


fit(4)
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
