"""Planted fault: forward moves a parameter by the mean of its own part of the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0)) + 2
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.centre = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(torch.tanh(self.first(x - self.centre)))


task = lockstep.Task(
    model=Centred,
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=8,
)
