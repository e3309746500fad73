"""Error: in a prepared script, ReduceLROnPlateau follows the training loss of the rank's own part."""
# EXPECT: learning rates differ between the ranks

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import lockstep

torch.manual_seed(2)
x = torch.randn(240, 6)
y = x[:, :1] * x[:, 1:2] + 0.5 * torch.randn(240, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
model, optimizer, scheduler, loader = lockstep.prepare(model, optimizer, scheduler, loader)
for _ in range(3):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
if torch.distributed.get_rank() == 0:
    rate = optimizer.param_groups[0]["lr"]
    print(f"lr {rate} norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
