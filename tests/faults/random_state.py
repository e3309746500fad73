"""Planted fault: dropout, whose masks depend on how the batch is divided."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.first(x)), 0.2, self.training))


task = lockstep.Task(
    model=Net,
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=8,
)
