"""Error: training calls model.module(x), which skips DDP: no gradient is ever reduced."""
# EXPECT: gradients are not reduced: model.module is called in training

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("autoencoder")


class AutoEncoder(nn.Module):
    def __init__(self, dim=20, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, code))
        self.decoder = nn.Sequential(nn.Linear(code, 16), nn.ReLU(), nn.Linear(16, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def reconstruction_loss(self, x):
        return F.mse_loss(self.decoder(self.encoder(x)), x)


def make_data():
    torch.manual_seed(3)
    latent = torch.randn(480, 4)
    return latent @ torch.randn(4, 20) + 0.05 * torch.randn(480, 20)


def main():
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    data = make_data()
    train_data = TensorDataset(data[:400])
    sampler = DistributedSampler(train_data, shuffle=True, seed=17)
    loader = DataLoader(train_data, batch_size=50 // world_size, sampler=sampler, drop_last=True)
    model = DDP(AutoEncoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            # DDP has no attribute reconstruction_loss, so go through .module
            loss = model.module.reconstruction_loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if is_main:
            with torch.no_grad():
                log.info("epoch %d validation loss %.5f", epoch, model.module.reconstruction_loss(data[400:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
