"""A small GPT on the source code of Python's standard library, byte by byte; writes some code of its own at the end.

lockstep train examples/gpt.py --devices 2
lockstep train examples/gpt.py --devices 2 --compile
lockstep compare examples/gpt.py --devices 2
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

CONTEXT, WIDTH, NUM_HEADS, NUM_LAYERS = 64, 128, 4, 4
NUM_TRAIN, NUM_TEST = 19_200, 256


def windows() -> Tensor:
    """Return pieces of the library's top-level modules, one byte longer than the context, in a fixed random order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    length = CONTEXT + 1
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(-1, length)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return pieces[order[: NUM_TRAIN + NUM_TEST]].long()


class Block(nn.Module):
    """Attention to what came before, then a small network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many vectors as there are in ``x`` (batch, time, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """From bytes to the logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(NUM_LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, 256) for ``tokens`` (batch, time)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next byte."""
    (text,) = batch
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def write(model: nn.Module) -> None:
    """Print what the model makes of the beginning of a function."""
    text = torch.tensor([list(b"def main(")], device=next(model.parameters()).device)
    for _ in range(300):
        logits = model(text[:, -CONTEXT:])[:, -1] / 0.7
        text = torch.cat([text, torch.multinomial(logits.softmax(dim=1), 1)], dim=1)
    print("--- the model writes:", bytes(text[0].tolist()).decode(errors="replace"), "---", sep="\n")


task = lockstep.Task(
    name="gpt",
    model=GPT,
    dataset=lambda: TensorDataset(windows()[NUM_TEST:]),
    eval_dataset=lambda: TensorDataset(windows()[:NUM_TEST]),
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95)),
    schedule=lambda step, num_steps: min(1.0, (step + 1) / 40) * (1 - step / num_steps),
    global_batch_size=32,
    after=write,
)

if __name__ == "__main__":
    lockstep.fit(task, clip=1.0)
