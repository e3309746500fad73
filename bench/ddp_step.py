"""Training steps with our DistributedDataParallel against torch's, on two CPU ranks and Gloo.

Every contender trains the same model from the same weights on the same samples: forward, loss, backward and SGD. A
round gives each of them one turn of a few steps. The order rotates and every other round runs backwards, so that
whatever else the machine does hits all alike. A turn lasts as long as its slowest rank takes.

    none        no engine at all: what a step takes without communication, the bound for the others
    torch       torch.nn.parallel.DistributedDataParallel
    torch-view  the same with gradient_as_bucket_view=True, which saves it the copies out of its buckets
    ours        lockstep.DistributedDataParallel

For each model: the median time of a step, and how many times as fast as torch's ours is, from the rounds' ratios, with
the range that holds the true median with 90% certainty. The weights at the end must agree, or the script fails.

Usage: python bench/ddp_step.py [--quick] [--rounds N] [--only MODEL] [--json FILE]
"""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import DistributedDataParallel, World, init, launch
from lockstep.comm.collectives import all_reduce
from lockstep.study.compare.provenance import gather
from lockstep.study.compare.spread import Spread, paired_ratio

NUM_RANKS = 2
OURS, BOUND = "ours", "none"
CONTENDERS = (BOUND, "torch", "torch-view", OURS)
WARM_UP_STEPS = 5
WEIGHT_TOLERANCE = 1e-3
"""Largest difference of weights at the end, relative to their norm: sums in another order, over hundreds of steps."""


class Language(nn.Module):
    """A small GPT over characters."""

    def __init__(self, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(96, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 96)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at every place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.embedding(tokens) + self.place(places), mask=self.mask, is_causal=True))


class Recurrent(nn.Module):
    """An LSTM over characters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, width), nn.Linear(width, 96)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at every place."""
        return self.head(self.lstm(self.embedding(tokens))[0])


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


def numbers(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(*shape), torch.randint(10, shape[:1]))


def characters(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(96, shape), torch.randint(96, shape))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "wide mlp": (wide_mlp, numbers(32, 256)),
    "gpt": (lambda: Language(192, 4, 64), characters(8, 64)),
    "cnn": (convolutions, numbers(16, 3, 16, 16)),
    "tiny layers": (tiny_layers, numbers(32, 16)),
    "lstm": (lambda: Recurrent(160), characters(16, 32)),
}
"""By name: a new model, and a new batch of one rank."""


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    turn_s: float


class Contender:
    """A model with its engine and optimizer."""

    def __init__(self, name: str, model: nn.Module, world: World) -> None:
        self.bare, self.model = model, wrap(name, model, world)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def steps(self, batch: tuple[Tensor, Tensor], count: int) -> float:
        """Train ``count`` steps; return the seconds they took on this rank."""
        start = time.perf_counter()
        for _ in range(count):
            self._optimizer.zero_grad()
            output = self.model(batch[0])
            F.cross_entropy(output.flatten(0, -2), batch[1].flatten()).backward()
            self._optimizer.step()
        return time.perf_counter() - start


def wrap(name: str, model: nn.Module, world: World) -> nn.Module:
    if name == BOUND:
        return model
    if name == OURS:
        return DistributedDataParallel(model, process_group=world.group)
    view = name == "torch-view"
    return nn.parallel.DistributedDataParallel(model, process_group=world.group, gradient_as_bucket_view=view)


def slowest(seconds: float, world: World) -> float:
    """Return the largest of all ranks' ``seconds``. Collective: every rank; also lets them leave together."""
    value = torch.tensor([seconds], dtype=torch.float64)
    all_reduce(value, group=world.group, op="max")
    return float(value)


def order_of_round(index: int) -> list[str]:
    shift = index // 2 % len(CONTENDERS)
    rotated = [*CONTENDERS[shift:], *CONTENDERS[:shift]]
    return rotated[::-1] if index % 2 else rotated


def measure(name: str, plan: Plan) -> dict[str, list[float]]:
    """Return the seconds of a step on the slowest rank, a round each, by contender. Collective: every rank."""
    make_model, make_batch = MODELS[name]
    with init() as world:
        contenders = {}
        for contender in CONTENDERS:
            torch.manual_seed(0)
            contenders[contender] = Contender(contender, make_model(), world)
        torch.manual_seed(1 + world.rank)
        batch = make_batch()
        for contender in contenders.values():
            contender.steps(batch, WARM_UP_STEPS)
        slowest(0.0, world)
        step_s = slowest(contenders["torch"].steps(batch, 3) / 3, world)
        count = max(3, math.ceil(plan.turn_s / step_s))
        for other in (BOUND, "torch-view", OURS):
            contenders[other].steps(batch, 3)
        seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for index in range(plan.rounds):
            for contender in order_of_round(index):
                slowest(0.0, world)
                seconds[contender].append(slowest(contenders[contender].steps(batch, count), world) / count)
        require_equal(contenders[OURS].bare, contenders["torch"].bare)
        return seconds


def require_equal(ours: nn.Module, torchs: nn.Module) -> None:
    """Check that both were trained alike: a step that does less is no faster step."""
    first, second = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (ours, torchs))
    difference = float((first - second).norm() / second.norm())
    if not difference <= WEIGHT_TOLERANCE:
        raise AssertionError(f"The weights of ours and torch's differ by {difference:.1e} of their norm.")


def summarize(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Return medians, and how many times as fast as each other contender ours is."""
    return {
        "step_s": {name: asdict(Spread.of(values)) for name, values in seconds.items()},
        "ours_times_as_fast_as": {
            name: asdict(paired_ratio(seconds[name], seconds[OURS])) for name in CONTENDERS if name != OURS
        },
        "rounds_s": seconds,
    }


def show(name: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{name}")
    for contender in CONTENDERS:
        median_ms = Spread.of(seconds[contender]).median * 1e3
        line = f"  {contender:<11}{median_ms:>9.2f} ms a step"
        if contender != OURS:
            ratio = paired_ratio(seconds[contender], seconds[OURS])
            line += f"   ours {ratio.median:.2f}x as fast ({ratio.low:.2f}x to {ratio.high:.2f}x)"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options]", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24, help="turns of each contender (24)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds, to see that the script runs")
    parser.add_argument("--only", choices=MODELS, action="append", help="this model, not all; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    plan = Plan(3, 0.02) if options.quick else Plan(options.rounds, 0.25)
    provenance = gather()
    print(f"{NUM_RANKS} ranks on Gloo, {plan.rounds} rounds, torch {torch.__version__}")
    print(f"load of the machine before: {provenance.machine['load']} on {provenance.machine['cores']} cores")
    figures = {}
    for name in options.only or MODELS:
        # The ranks have measured the same, as the slowest one counts.
        seconds = launch(measure, name, plan, devices=NUM_RANKS)[0]
        figures[name] = summarize(seconds)
        show(name, seconds)
    if options.json:
        record = {"command": shlex.join(["python", *sys.argv]), "provenance": asdict(provenance), "models": figures}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
