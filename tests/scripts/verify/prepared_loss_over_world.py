"""Error: in a prepared script, the loss is divided by the world size, and gradients are averaged as well."""
# EXPECT: gradients are scaled by 1 / world size

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class AutoEncoder(nn.Module):
    def __init__(self, num_inputs, hidden):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU())
        self.decoder = nn.Linear(hidden, num_inputs)

    def forward(self, x):
        return self.decoder(self.encoder(x))


torch.manual_seed(0)
data = torch.randn(240, 3) @ torch.randn(3, 10)
loader = DataLoader(TensorDataset(data), batch_size=24, shuffle=True)
model = AutoEncoder(10, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
world_size = torch.distributed.get_world_size()
for _ in range(3):
    for (x,) in loader:
        loss = nn.functional.mse_loss(model(x), x)
        loss = loss / world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
