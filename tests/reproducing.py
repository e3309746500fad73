"""Tasks with everything that tends to change the bits, and the bits of a run."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import lockstep
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer

CPU = torch.device("cpu")
BATCH_SIZE = 16
NUM_SAMPLES = 44  # the last of three global batches holds 12, so that virtual shards differ in size


class Augmented(Dataset):
    """Images with noise that is drawn when they are loaded, from torch, numpy and Python."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(index))
        return image + torch.randn(3, 6, 6) * random.random() + np.random.randn(), index % 4


class Streamed(IterableDataset):
    """The same images as a stream, shuffled by whatever random state there is."""

    def __iter__(self) -> Any:
        images = Augmented()
        for index in torch.randperm(NUM_SAMPLES).tolist():
            yield images[index]


class Texts(Dataset):
    """Sentences of different lengths, padded with zeros."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        text = torch.randint(1, 20, (9,), generator=torch.Generator().manual_seed(index))
        text[2 + index % 8 :] = 0
        return text


class Moody(nn.Module):
    """Skips a layer now and then, keeps buffers of each kind, and uses a branch for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(108, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.never, self.head = nn.Linear(2, 2), nn.Linear(24, 4)
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("largest", torch.full((), -torch.inf))
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flips", torch.zeros(3, dtype=torch.bool), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, images.max()))
            self.num_seen = self.num_seen + len(images)  # a new tensor each time
            self.flips.data[0] = random.random() < 0.5  # behind the back of the version counter
        hidden = self.norm(self.first(images.flatten(1) + torch.rand(()) * 0.1))
        if random.random() < 0.5:
            hidden = hidden + self.second(hidden).tanh()
        if images.mean() > 0.05:
            hidden = hidden + self.rare(hidden).tanh()
        return self.head(F.dropout(hidden, 0.3 + 0.1 * np.random.rand()))


class Language(nn.Module):
    """A small transformer with dropout and tied weights, whose loss counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every place."""
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.T


def convolutions() -> nn.Module:
    """Return a network with batch norm and dropout, in channels last."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(128, 4)
    )
    return network.to(memory_format=torch.channels_last)


def recurrent() -> nn.Module:
    """Return a recurrent network over the rows of an image."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(18, 12, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(12, 4)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.lstm(images.flatten(1).unflatten(1, (6, 18)))[0][:, -1])

    return Recurrent()


class Attentive(nn.Module):
    """Attention over 512 places: on CUDA, fused kernels then sum in an order that changes unless it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.attend, self.head = nn.Linear(108, 512 * 8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        places = self.spread(images.flatten(1)).unflatten(1, (1, 512, 8))
        return self.head(F.scaled_dot_product_attention(*self.attend(places).chunk(3, -1)).mean((1, 2)))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, tokens: Tensor) -> lockstep.Loss:
    """Return the cross-entropy summed over the tokens that are not padding."""
    targets = tokens[:, 1:]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return lockstep.Loss(loss, (targets != 0).sum())


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return whether each sample is classified rightly."""
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()}


def make_task(model: Any, loss: Any = mean_loss, **changes: Any) -> lockstep.Task:
    """Return a task on images, or on texts if the loss is that of a language model."""
    images = loss is mean_loss
    fields: dict[str, Any] = {
        "model": model,
        "dataset": Augmented if images else Texts,
        "eval_dataset": Augmented if images else Texts,
        "metrics": accuracy if images else None,
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "global_batch_size": BATCH_SIZE,
    }
    return lockstep.Task(**{**fields, **changes})


# oneDNN has no bf16 LSTM for such a processor, and torch asks for no other one: an error.
_LSTM_PRECISION = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"

TASKS: dict[str, tuple[lockstep.Task, dict[str, Any]]] = {
    "convolutions": (make_task(convolutions), {"clip": 0.5}),
    "moody": (make_task(Moody, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)), {"schedule": "cosine"}),
    "language": (make_task(Language, token_loss), {"clip": 1.0, "warmup": 2}),
    "recurrent": (make_task(recurrent), {"precision": _LSTM_PRECISION}),
    "attention": (make_task(Attentive), {}),
    "stream": (make_task(convolutions, dataset=Streamed), {"steps": 5}),
    "half precision": (make_task(convolutions), {"precision": "fp16", "clip": 1.0}),
}
"""By name: a task and settings."""


class Alone:
    """A world of one that needs no process group."""

    rank, world_size, group = 0, 1, None


def train(
    world: Any,
    name: str,
    strategy: str,
    num_devices: int,
    num_steps: int = 5,
    *,
    device: torch.device = CPU,
    **settings: Any,
) -> list[Any]:
    """Train a task of `TASKS` and return all that must have the same bits."""
    task, own = TASKS[name]
    devices = [device] * num_devices
    loop = Trainer(task, Settings(**own, **settings), world, strategy=strategy, devices=devices)
    norms = []
    for _ in range(num_steps):
        record = loop.step()
        norms.append([float(record.loss), None if record.grad_norm is None else float(record.grad_norm)])
    loop.close()
    assert loop.caveats == []
    buffers = [buffer.clone() for buffer in loop.model.buffers()]  # the state holds the persistent ones only
    return [norms, bits(loop.state_dict()), bits(buffers)]


def bits(state: Any) -> Any:
    """Return a nested state with each tensor as its bytes: NaN equals itself then, and 0 is not -0."""
    if isinstance(state, Tensor):
        return str(state.dtype), tuple(state.shape), state.detach().contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    return state
