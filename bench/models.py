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


def mlp(width: int, num_hidden: int) -> nn.Module:
    """Return a model with many parameters and little to compute."""
    hidden = [layer for _ in range(num_hidden) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def convolutions(width: int, num_layers: int, stride: int = 1) -> nn.Module:
    """Return a model with buffers to broadcast."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride, padding=1)]
    for _ in range(num_layers):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def tiny_layers(num_layers: int) -> nn.Module:
    """Return a model whose step is mostly bookkeeping: two small parameters a layer."""
    layers = [layer for _ in range(num_layers - 1) for layer in (nn.Linear(16, 16), nn.Tanh())]
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
    "wide mlp": Workload(lambda: mlp(1792, 2), numbers(32, 256)),
    "gpt": Workload(lambda: Language(192, 4, 64), characters(8, 64)),
    "cnn": Workload(lambda: convolutions(32, 8), numbers(16, 3, 16, 16)),
    "tiny layers": Workload(lambda: tiny_layers(200), numbers(32, 16)),
    "lstm": Workload(lambda: Recurrent(160), characters(16, 32)),
}
# Larger ones (but for the tiny layers), where more of a step is memory traffic.
LARGE_MODELS = {
    "mlp 25M": Workload(lambda: mlp(2048, 6), numbers(32, 256)),
    "gpt 17M": Workload(lambda: Language(384, 9, 64), characters(4, 64)),
    "cnn 1.6M": Workload(lambda: convolutions(128, 11, stride=2), numbers(16, 3, 16, 16)),
    "100 tiny": Workload(lambda: tiny_layers(100), numbers(32, 16)),
    "lstm 2M": Workload(lambda: Recurrent(350), characters(16, 32)),
}
SMALL = Workload(small_mlp, numbers(64, 64))


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the mean loss of a batch, of whichever of the models."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
