"""Planted fault: the mean over tokens that are not padding, where ranks have unequally many of them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def sentences():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (40, 7), generator=generator)
    lengths = torch.randint(2, 8, (40, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(7) < lengths, tokens, 0))


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def loss(model, batch):
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


task = lockstep.Task(
    model=Next,
    dataset=sentences,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=8,
)
