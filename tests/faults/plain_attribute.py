"""Planted fault: the model centres its input by a running mean that it keeps in a plain attribute."""

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
        self.mean = torch.zeros(6)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.last(torch.tanh(self.first(x - self.mean)))


task = lockstep.Task(
    model=Centred,
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=8,
)
