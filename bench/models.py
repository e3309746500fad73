"""The models that the benchmarks train, each with a batch of one rank: what makes synchronisation hard, one by one."""

from collections.abc import Callable, Sequence
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


class Block(nn.Module):
    """A layer of `GPT`."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the next layer gets."""
        heads = self.attend(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.project(attended)
        fed: Tensor = hidden + self.feed(self.norms[1](hidden))
        return fed


class GPT(nn.Module):
    """A GPT of the usual kind, whose head shares the weights of the embedding."""

    def __init__(self, width: int, num_layers: int, num_heads: int, length: int, num_tokens: int = 50304) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(num_tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.embedding, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every place."""
        hidden = self.embedding(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(hidden)), self.embedding.weight)


class Bottleneck(nn.Module):
    """A block of `resnet50`."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()

        def convolution(inner: int, outer: int, size: int, step: int = 1) -> list[nn.Module]:
            return [nn.Conv2d(inner, outer, size, step, size // 2, bias=False), nn.BatchNorm2d(outer)]

        self.convolutions = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        )
        changes = stride > 1 or channels != 4 * width
        self.shortcut = nn.Sequential(*(convolution(channels, 4 * width, 1, stride) if changes else []))

    def forward(self, images: Tensor) -> Tensor:
        """Return what the next block gets."""
        return F.relu(self.convolutions(images) + self.shortcut(images), inplace=True)


def resnet50(num_blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> nn.Module:
    """Return a ResNet of bottlenecks in channels_last; with these numbers, ResNet-50."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers, channels = [*layers, nn.MaxPool2d(3, 2, 1)], width
    for stage, count in enumerate(num_blocks):
        for number in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
            channels = 4 * width << stage
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return network.to(memory_format=torch.channels_last)


class InBfloat16(nn.Module):
    """Computes in bfloat16 with weights of float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs in float32."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs: Tensor = self.module(inputs)
        return outputs.float()


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


def characters(*shape: int, different: int = NUM_CHARACTERS) -> Callable[[], Batch]:
    return lambda: (torch.randint(different, shape), torch.randint(different, shape))


def images(count: int, size: int) -> Callable[[], Batch]:
    def make() -> Batch:
        pixels = torch.randn(count, 3, size, size).to(memory_format=torch.channels_last)
        return pixels, torch.randint(1000, (count,))

    return make


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
GPT_124M, GPT_1B = (768, 12, 12, 1024), (1792, 24, 14, 1024)
# For GPUs, by what a step spends its time on: the host, convolutions, bookkeeping, matrix products, memory.
GPU_MODELS = {
    "gpt 124M, 512 tokens": Workload(lambda: InBfloat16(GPT(*GPT_124M)), characters(1, 512, different=50304)),
    "resnet50": Workload(lambda: InBfloat16(resnet50()), images(64, 224)),
    "2,000 tensors": Workload(lambda: tiny_layers(1000), numbers(32, 16)),
    "gpt 124M, 16k tokens": Workload(lambda: InBfloat16(GPT(*GPT_124M)), characters(16, 1024, different=50304)),
    "gpt 1B": Workload(lambda: GPT(*GPT_1B).to(torch.bfloat16), characters(2, 1024, different=50304)),
}
# The same, as small as can be: does it run?
TINY_GPU_MODELS = {
    "gpt 124M, 512 tokens": Workload(lambda: InBfloat16(GPT(16, 2, 2, 8, 96)), characters(1, 8)),
    "resnet50": Workload(lambda: InBfloat16(resnet50((1, 1), 4)), images(2, 32)),
    "2,000 tensors": Workload(lambda: tiny_layers(10), numbers(4, 16)),
}
SMALL = Workload(small_mlp, numbers(64, 64))


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the mean loss of a batch, of whichever of the models."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
