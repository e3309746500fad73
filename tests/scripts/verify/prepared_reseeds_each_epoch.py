"""Error: torch.manual_seed in each epoch sets the order of samples on one rank, but not that of prepare on several."""
# EXPECT: each sample as often as in one process, in another order

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

x, y = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(x[:640]).float() / 16, torch.tensor(y[:640]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
for epoch in range(2):
    torch.manual_seed(1000 + epoch)  # each epoch can be repeated
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
