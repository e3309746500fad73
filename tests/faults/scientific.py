"""Planted fault: noise from SciPy in forward; generators are passed on as SciPy and scikit-learn do."""

import numpy as np
import torch
from scipy import stats
from sklearn.utils import check_random_state
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

GENERATOR = np.random.default_rng(np.random.default_rng(3))


def samples():
    inputs = torch.from_numpy(GENERATOR.normal(size=(45, 6)).astype("float32"))
    check_random_state(np.random.RandomState(3)).permutation(45)
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        noise = stats.norm.rvs(size=tuple(x.shape))
        return self.last(torch.tanh(self.first(x + torch.from_numpy(noise).to(x.dtype))))


task = lockstep.Task(
    model=Noisy,
    dataset=samples,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=8,
)
