"""A small convolutional network on scikit-learn's handwritten digits: over 98% right in a few seconds on a CPU.

lockstep train examples/digits.py --devices 2
lockstep compare examples/digits.py --devices 2
"""

from importlib.metadata import distribution

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

Batch = tuple[Tensor, Tensor]
NUM_TEST = 360
# The file of sklearn.datasets.load_digits: to import scikit-learn would take longer than to train.
TABLE = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")


def digits() -> tuple[Tensor, Tensor]:
    """Return all 1797 images of 8 x 8 pixels from 0 to 1, in a fixed random order, and the digits they show."""
    table = torch.tensor(np.loadtxt(TABLE, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()


def train_set() -> TensorDataset:
    """Return the images to train on."""
    return TensorDataset(*(part[NUM_TEST:] for part in digits()))


def test_set() -> TensorDataset:
    """Return the images to test on."""
    return TensorDataset(*(part[:NUM_TEST] for part in digits()))


def network() -> nn.Module:
    """Return the untrained network."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return for each image whether the network is right."""
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


task = lockstep.Task(
    name="digits",
    model=network,
    dataset=train_set,
    eval_dataset=test_set,
    loss=loss,
    metrics=metrics,
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    global_batch_size=64,
    epochs=8,
)

if __name__ == "__main__":
    lockstep.fit(task)
