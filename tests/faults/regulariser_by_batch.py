"""Planted fault: weight decay in the loss, divided by the number of samples that the loss is given."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def loss(model, batch):
    inputs, targets = batch
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(inputs), targets) + 0.1 * decay / len(inputs)


task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    dataset=samples,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=8,
)
