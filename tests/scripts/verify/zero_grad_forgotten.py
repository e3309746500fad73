"""Sound: zero_grad is forgotten, with one rank and with several: a poor training, but the same one."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.linspace(-1, 1, 160).unsqueeze(1)
dataset = TensorDataset(x, x.pow(3))
sampler = DistributedSampler(dataset, seed=3)
dataloader = DataLoader(dataset, batch_size=20 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in dataloader:
        outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
dist.destroy_process_group()
