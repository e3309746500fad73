"""Sound: optimizer.step(closure) with SGD and a divided batch, as PyTorch Lightning calls its optimizers."""
# EXPECT: sound script

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LitRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Trainer:
    """The loop of a trainer that leaves zero_grad and backward to the optimizer."""

    def __init__(self, max_epochs, world_size):
        self.max_epochs, self.world_size = max_epochs, world_size

    def fit(self, module, dataset, batch_size):
        sampler = DistributedSampler(dataset, seed=0)
        loader = DataLoader(dataset, batch_size // self.world_size, sampler=sampler)
        optimizer = module.configure_optimizers()
        model = DDP(module)
        for epoch in range(self.max_epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.step(closure=lambda batch=batch: self.training_step(model, optimizer, batch))

    def training_step(self, model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        return loss


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    module = LitRegressor()
    Trainer(3, int(os.environ["WORLD_SIZE"])).fit(module, TensorDataset(x, x.sum(1, keepdim=True)), 24)
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(module.parameters()).norm().item():.5f}")
    dist.destroy_process_group()
