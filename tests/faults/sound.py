"""Nothing planted: a network, and a small GPT whose loss counts tokens; both the same run on any number of ranks."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def sentences():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (27, 7), generator=generator)
    lengths = torch.randint(2, 8, (27, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(7) < lengths, tokens, 0))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) * math.sqrt(8) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def token_loss(model, batch):
    (tokens,) = batch
    logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    total = F.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
    return lockstep.Loss(total, (targets != 0).sum())


task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Linear(16, 3)),
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    schedule=lambda step, num_steps: 1 - step / num_steps,
    global_batch_size=8,
)
gpt = lockstep.Task(
    model=GPT,
    dataset=sentences,
    loss=token_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=8,
)
