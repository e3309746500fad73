"""Planted fault: the mean over the valid samples; the epoch's last batch has two, and one of them is not valid."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(18, 6, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(18, dtype=torch.bool)
    valid[::2] = False
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1), valid)


def loss(model, batch):
    inputs, targets, valid = batch
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return (losses * valid).sum() / valid.sum().clamp(min=1)


task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    dataset=samples,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=8,
)
