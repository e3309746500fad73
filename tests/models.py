"""A dozen small model families in float64, each with a function that makes a batch and one that gives a mean loss."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Family(NamedTuple):
    """``build()`` a model; ``batch(n, generator)`` of n samples; ``loss(model, batch)``, a mean over samples."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def vectors(n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(n, 6, generator=generator), torch.randn(n, 3, generator=generator)


def images(n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(n, 2, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)


def tokens(n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(11, (n, 5), generator=generator), torch.randint(11, (n, 5), generator=generator)


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def class_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolutions(x).flatten(1))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class Transformer(nn.Module):
    """With the embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(x)))


class Frozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self[0].requires_grad_(False)


class Reused(nn.Module):
    """One layer used twice in a forward, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.middle(self.first(x))))))


class Checkpointed(Reused):
    """The layer that is used twice is checkpointed twice."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(lambda h: torch.tanh(self.middle(h)), hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)


@dataclass
class Answer:
    logits: Tensor
    extras: dict[str, Any]


class Structured(MLP):
    """Returns a dataclass that holds a dict."""

    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x), {"name": "x", "inputs": (x,)})


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class ChannelsLast(CNN):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 3, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).float()).double()


FAMILIES = {
    "mlp": Family(MLP, vectors, squared_error),
    "cnn": Family(CNN, images, class_error),
    "lstm": Family(LSTM, tokens, class_error),
    "transformer": Family(Transformer, tokens, class_error),
    "frozen": Family(Frozen, vectors, squared_error),
    "reused": Family(Reused, vectors, squared_error),
    "checkpoint": Family(lambda: Checkpointed(False), vectors, squared_error),
    "reentrant": Family(lambda: Checkpointed(True), vectors, squared_error),
    "structured": Family(Structured, vectors, lambda model, batch: F.mse_loss(model(batch[0]).logits, batch[1])),
    "sparse": Family(SparseEmbedding, tokens, class_error),
    "channels_last": Family(ChannelsLast, images, class_error),
    "complex": Family(Complex, vectors, squared_error),
}


def soak(cases: Iterable[Any]) -> list[Any]:
    """Return cases of a parametrised test that only ``make soak`` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a model in float64 whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[name].build()
        return model if name == "complex" else model.double()


def global_batch(name: str, num_samples: int, seed: int) -> tuple[Tensor, ...]:
    """Return a batch in float64."""
    parts = FAMILIES[name].batch(num_samples, torch.Generator().manual_seed(seed))
    return tuple(part.double() if part.is_floating_point() else part for part in parts)


def share(batch: tuple[Tensor, ...], rank: int, world_size: int) -> tuple[Tensor, ...]:
    """Return rank's equal share of a batch."""
    return tuple(part.chunk(world_size)[rank] for part in batch)


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    scale = dense(expected).abs().square().sum().sqrt().item()
    difference = (dense(actual) - dense(expected)).abs().square().sum().sqrt().item()
    return difference / scale if scale else difference


def assert_gradients_equal(model: nn.Module, oracle: nn.Module, tolerance: float = 1e-12) -> None:
    """Compare all gradients of two models of the same kind; None must be None in both."""
    for (name, parameter), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None:
            assert relative_error(parameter.grad, expected.grad) < tolerance, name
