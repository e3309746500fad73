"""Planted fault: only rank 1 moves the temperature that the model keeps in a buffer."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x):
        if os.environ["RANK"] == "1":
            self.temperature.mul_(1.1)
        return self.last(torch.tanh(self.first(x))) / self.temperature


task = lockstep.Task(
    model=Tempered,
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=8,
)
