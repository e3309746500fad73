"""Planted faults: five at once."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(RANK))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


class OwnNorm(nn.BatchNorm1d):
    """A class of one's own, which `fit` does not synchronise."""


task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 16), OwnNorm(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)),
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01 * WORLD_SIZE),
    global_batch_size=8,
)
