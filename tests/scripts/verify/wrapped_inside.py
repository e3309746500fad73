"""Sound: a task has the model and its loss, and wraps the model in itself on several ranks only, as timm does."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)


dist.init_process_group(backend="gloo")
torch.manual_seed(0)
task = Task()
if dist.get_world_size() > 1:
    task.model = DDP(task.model)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data[:256], dtype=torch.float32) / 16, torch.tensor(digits.target[:256]))
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, 32 // dist.get_world_size(), sampler=sampler)
optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = task(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
