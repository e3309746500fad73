"""Error: an optimizer with Polyak's step size is given a closure that returns the loss of the rank's own part."""
# EXPECT: the update depends on the rank

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SPS(Optimizer):
    """Stochastic Polyak step size: the loss over the squared norm of the gradient, bounded."""

    def __init__(self, params, c=1.0, max_step=5.0):
        super().__init__(params, {"c": c, "max_step": max_step})

    def step(self, closure):
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        squared = sum(p.grad.square().sum() for p in params).item()
        group = self.param_groups[0]
        step_size = min(loss.item() / (group["c"] * squared + 1e-8), group["max_step"])
        with torch.no_grad():
            for p in params:
                p.sub_(p.grad, alpha=step_size)
        return loss


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(160, 6)
y = (x[:, 0] + 0.3 * torch.randn(160) > 0).float()
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 20 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)))
optimizer = SPS(model.parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
if dist.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
dist.destroy_process_group()
