"""Sound: optimizer.step(closure) in a prepared script: LBFGS, with the loss of all ranks."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

torch.manual_seed(0)
t = torch.linspace(0, 12, 240)
wave = torch.sin(t)[:, None] + 0.1 * torch.randn(240, 4)
loader = DataLoader(TensorDataset(wave[:-1], wave[1:, :1]), batch_size=120)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=5)
model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
for _ in range(4):
    for inputs, target in loader:

        def closure(inputs=inputs, target=target):
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            total = loss.detach() / dist.get_world_size()
            dist.all_reduce(total)
            return total

        optimizer.step(closure)
if dist.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
