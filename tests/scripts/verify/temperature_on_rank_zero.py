"""Error: the temperature, a plain attribute of the model, is annealed on rank 0 only."""
# EXPECT: attribute changed on one rank only: temperature

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SoftExperts(nn.Module):
    """A small mixture of experts with an annealed gate."""

    def __init__(self, dim: int, num_experts: int = 4):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(nn.Linear(dim, 1) for _ in range(num_experts))
        self.temperature = 4.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = F.softmax(self.gate(x) / self.temperature, dim=-1)
        outputs = torch.cat([expert(x) for expert in self.experts], dim=-1)
        return (weights * outputs).sum(-1)


def piecewise(n: int) -> TensorDataset:
    x = torch.randn(n, 8)
    y = torch.where(x[:, 0] > 0, 2 * x[:, 1], -x[:, 2])
    return TensorDataset(x, y)


def train(total_epochs: int = 3, global_batch: int = 40) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(99)
    train_set, test_set = piecewise(400), piecewise(120)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=global_batch // world_size, sampler=sampler)
    model = DistributedDataParallel(SoftExperts(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    step = 0
    for epoch in range(total_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.smooth_l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                model.module.temperature = max(0.5, model.module.temperature * 0.9)
                if step % 5 == 0:
                    print(f"step {step}: temperature {model.module.temperature:.3f}")
        x, y = test_set.tensors
        with torch.no_grad():
            error = F.l1_loss(model.module(x), y)
        if rank == 0:
            print(f"epoch {epoch}: test error {error.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
