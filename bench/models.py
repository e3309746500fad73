"""The models that the benchmarks train, each with a batch of one rank: what makes synchronisation hard, one by one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
NUM_CHARACTERS = 96


class Language(nn.Module):
    """A small GPT over characters."""

    def __init__(self, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(NUM_CHARACTERS, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at every place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.place(places)
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


class Recurrent(nn.Module):
    """An LSTM over characters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_CHARACTERS, width), nn.Linear(width, NUM_CHARACTERS)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at every place."""
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


def wide_mlp() -> nn.Module:
    """Return a model with many parameters and little to compute: 7 million."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(1792, 1792), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, 1792), nn.ReLU(), *hidden, nn.Linear(1792, 10))


def convolutions() -> nn.Module:
    """Return a model with buffers to broadcast."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(8):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def tiny_layers() -> nn.Module:
    """Return a model whose step is mostly bookkeeping: 400 small parameters."""
    layers = [layer for _ in range(199) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(16, 10))


def small_mlp() -> nn.Module:
    """Return a model whose step takes a fraction of a millisecond."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def numbers(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(*shape), torch.randint(10, shape[:1]))


def characters(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(NUM_CHARACTERS, shape), torch.randint(NUM_CHARACTERS, shape))


@dataclass(frozen=True)
class Workload:
    """How to make a new model, and a new batch of one rank."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]


MODELS = {
    "wide mlp": Workload(wide_mlp, numbers(32, 256)),
    "gpt": Workload(lambda: Language(192, 4, 64), characters(8, 64)),
    "cnn": Workload(convolutions, numbers(16, 3, 16, 16)),
    "tiny layers": Workload(tiny_layers, numbers(32, 16)),
    "lstm": Workload(lambda: Recurrent(160), characters(16, 32)),
}
SMALL = Workload(small_mlp, numbers(64, 64))


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the mean loss of a batch, of whichever of the models."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
