"""Planted fault: batch norm, over the part of the batch that a rank has."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def images():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(28, 2, 6, 6, generator=generator), torch.randint(0, 3, (28,), generator=generator))


class OwnNorm(nn.BatchNorm2d):
    """A class of one's own, which `fit` does not synchronise."""


def network():
    return nn.Sequential(nn.Conv2d(2, 4, 3), OwnNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


task = lockstep.Task(
    model=network,
    dataset=images,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    global_batch_size=8,
)
synchronised = lockstep.Task(
    model=lambda: lockstep.SyncBatchNorm.convert_sync_batchnorm(network()),
    dataset=images,
    loss=task.loss,
    optimizer=task.optimizer,
    global_batch_size=8,
)
