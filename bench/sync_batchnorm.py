"""SyncBatchNorm on the CPU: against torch's batch norm in one process, and what the other ranks cost.

Every contender normalises the same input, forward and backward with all three gradients, with one thread. A round gives
each of them one turn of a few steps, in an order that rotates; every other round runs backwards.

    plain       torch.nn.BatchNorm2d or 1d of one process: no exchange, the bound for the others
    ours        lockstep.SyncBatchNorm on two ranks over Gloo, each with an input of that size
    formulas    batch norm over the same two ranks written out with tensor operations, since torch's SyncBatchNorm
                refuses the CPU: sums of x and x*x, and of the gradient, in one all-reduce each

For each input: the median time of a forward and backward on the slower rank, how many times as long as plain it takes
from the rounds' ratios, with the range that holds the true median with 90% certainty, and how long the two collectives
alone take. Outputs of ours and of the formulas must agree, or the script fails.

Usage: python bench/sync_batchnorm.py [--quick] [--rounds N] [--json FILE]
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import SyncBatchNorm, World, init, launch
from lockstep.comm.collectives import all_gather, all_reduce
from lockstep.study.common import Spread, paired_ratio
from lockstep.telemetry.provenance import gather

NUM_RANKS = 2
PLAIN, OURS, FORMULAS, EXCHANGE = "plain", "ours", "formulas", "exchange"
CONTENDERS = (PLAIN, OURS, FORMULAS, EXCHANGE)
TOLERANCE = 1e-4
"""Largest difference between outputs of ours and of the formulas, in float32."""

SHAPES = {
    "images 32 x 64 x 56 x 56": (32, 64, 56, 56),
    "the same, channels_last": (32, 64, 56, 56),
    "images 16 x 256 x 14 x 14": (16, 256, 14, 14),
    "images 32 x 512 x 4 x 4": (32, 512, 4, 4),
    "vectors 256 x 512": (256, 512),
}


class ByFormulas(nn.Module):
    """Batch norm over all ranks as one would write it down, with autograd through the sums."""

    def __init__(self, num_features: int, world: World) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self._world = world

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        dims = [0, *range(2, x.dim())]
        sums = torch.stack([x.sum(dims), (x * x).sum(dims)])
        mean, square = Sum.apply(sums, self._world) / (NUM_RANKS * x.numel() / x.shape[1])
        scale = torch.rsqrt(square - mean * mean + 1e-5) * self.weight
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return (x - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)


class Sum(torch.autograd.Function):
    """The sum over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        """Return the sum. Collective: every rank."""
        ctx.world = world
        total = tensor.clone()
        all_reduce(total, group=world.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients. Collective: every rank."""
        total = gradient.contiguous()
        all_reduce(total, group=ctx.world.group)
        return total, None


def contender(name: str, num_features: int, shape: tuple[int, ...], world: World) -> Callable[[Tensor], object]:
    """Return what a turn repeats for an input."""
    if name == EXCHANGE:
        vector = torch.zeros(2 * num_features + 2, dtype=torch.float64)

        def exchange(_: Tensor) -> None:
            all_gather(vector, group=world.group)
            all_reduce(vector, group=world.group)

        return exchange
    plain = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    layer = {
        PLAIN: lambda: plain(num_features),
        OURS: lambda: SyncBatchNorm(num_features),
        FORMULAS: lambda: ByFormulas(num_features, world),
    }[name]()
    gradient = torch.randn(shape)

    def step(x: Tensor) -> Tensor:
        nonlocal gradient
        x = x.detach().requires_grad_()
        output = layer(x)
        if gradient.stride() != output.stride():
            gradient = torch.empty_like(output).copy_(gradient)
        output.backward(gradient)
        layer.weight.grad = layer.bias.grad = None
        return output

    return step


def slowest(seconds: float, world: World) -> float:
    """Return the larger of the ranks' ``seconds``. Collective: every rank; also lets them leave together."""
    value = torch.tensor([seconds], dtype=torch.float64)
    all_reduce(value, group=world.group, op="max")
    return float(value)


def measure(name: str, num_rounds: int, turn_s: float) -> dict[str, list[float]]:
    """Return the seconds of a forward and backward on the slower rank, a round each. Collective: every rank."""
    shape = SHAPES[name]
    torch.set_num_threads(1)
    with init() as world:
        torch.manual_seed(world.rank)
        x = torch.randn(shape)
        if "channels_last" in name:
            x = x.contiguous(memory_format=torch.channels_last)
        steps = {other: contender(other, shape[1], shape, world) for other in CONTENDERS}
        difference = float((steps[OURS](x) - steps[FORMULAS](x)).detach().abs().max())
        if not difference <= TOLERANCE:
            raise AssertionError(f"The outputs of ours and of the formulas differ by {difference:.1e}.")

        def turn(other: str, count: int) -> float:
            slowest(0.0, world)
            start = time.perf_counter()
            for _ in range(count):
                steps[other](x)
            return slowest((time.perf_counter() - start) / count, world)

        counts = {other: max(2, int(turn_s / max(turn(other, 3), 1e-5))) for other in CONTENDERS}
        seconds: dict[str, list[float]] = {other: [] for other in CONTENDERS}
        for index in range(num_rounds):
            shift = index // 2 % len(CONTENDERS)
            order = [*CONTENDERS[shift:], *CONTENDERS[:shift]]
            for other in order[::-1] if index % 2 else order:
                seconds[other].append(turn(other, counts[other]))
        return seconds


def show(name: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{name}")
    for other in CONTENDERS:
        line = f"  {other:<10}{Spread.of(seconds[other]).median * 1e3:>9.3f} ms"
        if other in (OURS, FORMULAS):
            ratio = paired_ratio(seconds[other], seconds[PLAIN])
            line += f"   {ratio.median:.2f}x as long as plain ({ratio.low:.2f}x to {ratio.high:.2f}x)"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options]", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24, help="turns of each contender (24)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds, to see that the script runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    num_rounds, turn_s = (3, 0.01) if options.quick else (options.rounds, 0.1)
    provenance = gather()
    print(f"{NUM_RANKS} ranks on Gloo, {num_rounds} rounds, torch {torch.__version__}")
    print(f"load of the machine before: {provenance.machine['load']} on {provenance.machine['cores']} cores")
    figures = {}
    for name in SHAPES:
        seconds = launch(measure, name, num_rounds, turn_s, devices=NUM_RANKS)[0]
        figures[name] = seconds
        show(name, seconds)
    if options.json:
        record = {"command": shlex.join(["python", *sys.argv]), "provenance": asdict(provenance), "seconds": figures}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
