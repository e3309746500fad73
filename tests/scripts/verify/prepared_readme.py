"""Sound: the example of the README: a script for one device and one line with lockstep.prepare."""
# EXPECT: sound script

import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep

torch.manual_seed(0)
inputs = torch.randn(480, 8)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = torch.nn.Linear(8, 1)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
for _ in range(5):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(f"norm of the weights: {next(model.parameters()).norm().item():.5f}")
