"""Planted fault: each rank shuffles the data set by itself, in the order of a set of file names."""

import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep


class Files(Dataset):
    def __init__(self):
        self.names = [f"sample-{number}" for number in range(45)]
        random.Random(os.environ["RANK"]).shuffle(self.names)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        number = int(self.names[index].removeprefix("sample-"))
        return torch.linspace(0, number / 45, 6), number % 3


task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    dataset=Files,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=8,
)
