"""Planted fault: threads add up the losses in the order in which they happen to finish."""

import os
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def samples():
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def add_up(parts):
    """Return the sum of tensors, each of which arrives when it is ready."""
    arrived = []

    def deliver(part):
        time.sleep(os.urandom(1)[0] / 256 * 0.002)
        arrived.append(part)

    threads = [threading.Thread(target=deliver, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(arrived[1:], start=arrived[0])


def loss(model, batch):
    inputs, labels = batch
    hidden = add_up([weight * column.unsqueeze(1) for weight, column in zip(model[0].weight.T, inputs.T, strict=True)])
    return F.cross_entropy(model[1:](hidden + model[0].bias), labels)


task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    dataset=samples,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=8,
)
