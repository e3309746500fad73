"""DataParallel on two CPU devices against one device and against how torch's DataParallel works.

Every round runs every contender once, in an order that rotates, so that whatever else the machine does hits all alike.
A step is forward, loss and backward of the same batch. For each contender: the median time of a step, and the median
over the rounds of its time divided by that of "single" in the same round, with the quartiles.

torch's DataParallel does not run on the CPU. "torch-style" does the same work there: it replicates the module at every
forward, copies the parameters to the second replica through autograd, starts a thread a replica and gathers the
outputs. In its favour its threads, too, get one core each.

With ``--against-ddp``: training steps of the five models of bench/models.py on two CPU devices with one core each, ours
(`DistributedDataParallel` on shm, two processes), with ZeRO-1, ``dp`` (`DataParallel`, one process, two threads), and
one process with one core for the batches of both; interleaved, see bench/steps.py. What each GPU holds at its peak is
for bench/gpu_proof.py: CPU devices share memory.

Usage: python -m bench.data_parallel [--rounds N] [--against-ddp [--only MODEL]] [--json FILE]
"""

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import harness, steps
from bench.models import MODELS
from lockstep import launch
from lockstep.parallel.dp.wrapper import DataParallel

NUM_DEVICES = 2
WARM_UP_ROUNDS = 2

Step = Callable[[], None]


class CopyParameters(torch.autograd.Function):
    """The parameters for every replica, the first as they are, the others copied; backward sums."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of the first replica, then those of the next."""
        ctx.count = len(parameters)
        return tuple(p.view_as(p) if device == 0 else p.clone() for device in range(NUM_DEVICES) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Sum the gradients of each parameter over the replicas."""
        rows = [gradients[start : start + ctx.count] for start in range(0, len(gradients), ctx.count)]
        return tuple(sum(parts[1:], parts[0]) for parts in zip(*rows, strict=True))


def replicate(module: nn.Module) -> list[nn.Module]:
    """Build new replicas, as torch's ``replicate`` does at every forward."""
    parameters = list(module.parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    copies: tuple[Tensor, ...] = CopyParameters.apply(*parameters)  # type: ignore[no-untyped-call]
    modules = list(module.modules())
    replicas = []
    for device in range(NUM_DEVICES):
        shells = {id(source): source._replicate_for_data_parallel() for source in modules}
        for source in modules:
            shell = shells[id(source)]
            for name, child in source._modules.items():
                setattr(shell, name, shells[id(child)])
            for name, parameter in source._parameters.items():
                if parameter is None:
                    shell._parameters[name] = None
                else:
                    setattr(shell, name, copies[device * len(parameters) + numbers[id(parameter)]])
            for name, buffer in source._buffers.items():
                setattr(shell, name, buffer if device == 0 or buffer is None else buffer.clone())
        replicas.append(shells[id(module)])
    return replicas


def torch_style(module: nn.Module, inputs: Tensor) -> Tensor:
    """Call new replicas in new threads and join their outputs."""
    outputs: dict[int, Tensor] = {}
    cores = max(1, torch.get_num_threads() // NUM_DEVICES)

    def work(index: int, replica: nn.Module, part: Tensor) -> None:
        torch.get_num_threads()
        torch.set_num_threads(cores)
        outputs[index] = replica(part)

    total = torch.get_num_threads()
    jobs = enumerate(zip(replicate(module), inputs.chunk(NUM_DEVICES), strict=True))
    threads = [threading.Thread(target=work, args=(index, *job)) for index, job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(total)
    return torch.cat([outputs[index] for index in range(NUM_DEVICES)])


class Language(nn.Module):
    """A small transformer over characters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at every place."""
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def convolutions(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def cases() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Models from too small to gain to large enough, each with a batch."""
    return {
        "mlp, 2 layers of 64, 32 samples": (
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            torch.randn(32, 64),
            torch.randint(10, (32,)),
        ),
        "cnn, 20 layers of 32, 16 images": (
            convolutions(32, 20),
            torch.randn(16, 3, 32, 32),
            torch.randint(10, (16,)),
        ),
        "transformer, 6 layers of 192, 8 x 128 tokens": (
            Language(192, 6),
            torch.randint(96, (8, 128)),
            torch.randint(96, (8, 128)),
        ),
        "wide mlp, 3 layers of 2048, 64 samples": (
            nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)),
            torch.randn(64, 2048),
            torch.randint(10, (64,)),
        ),
    }


def loss_of(module: Callable[[Tensor], Tensor], shard: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(shard[0]).flatten(0, -2), shard[1].flatten())


def contenders(module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Step]:
    model = DataParallel(module, ["cpu"] * NUM_DEVICES)
    shards = list(zip(inputs.chunk(NUM_DEVICES), targets.chunk(NUM_DEVICES), strict=True))
    scales = [1 / NUM_DEVICES] * NUM_DEVICES

    def step(network: Callable[[Tensor], Tensor]) -> None:
        loss_of(network, (inputs, targets)).backward()

    def backward() -> None:
        model.backward(loss_of, shards, scales)

    return {
        "single": functools.partial(step, module),
        "torch-style": functools.partial(step, functools.partial(torch_style, module)),
        "forward": functools.partial(step, model),
        "backward": backward,
    }


def measure(module: nn.Module, turns: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step by contender, one a round."""
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-WARM_UP_ROUNDS, rounds):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            module.zero_grad()
            start = time.perf_counter()
            turns[name]()
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median time and the ratio to "single" with its quartiles, by contender."""
    result = {}
    for name, own in seconds.items():
        ratios = [mine / single for mine, single in zip(own, seconds["single"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[name] = {"median_s": statistics.median(own), "ratio": middle, "ratio_low": low, "ratio_high": high}
    return result


def against_ddp(num_rounds: int, names: list[str]) -> dict[str, Any]:
    """Measure and print the steps of the models ``names``."""
    plan = steps.Plan(num_rounds, 0.25, ["torch", "ours", "ours-zero", "dp", "single"])
    figures = {}
    for name in names:
        seconds = launch(steps.measure, name, plan, devices=NUM_DEVICES, timeout_s=harness.SECTION_TIMEOUT_S)[0]
        figures[name] = harness.summarize(seconds)
        harness.show(f"{name}: {NUM_DEVICES} devices, {num_rounds} rounds", seconds, ("ours", "ours-zero", "single"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure DataParallel on the CPU.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--against-ddp", action="store_true", help="compare with our DistributedDataParallel")
    parser.add_argument(
        "--only", choices=MODELS, action="append", help="with --against-ddp: this model; may be repeated"
    )
    options = parser.parse_args()
    if options.against_ddp:
        figures = against_ddp(options.rounds, options.only or list(MODELS))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
        return
    torch.manual_seed(0)
    print(f"{NUM_DEVICES} CPU devices, {torch.get_num_threads()} cores, {options.rounds} rounds")
    tables = {}
    for title, (module, inputs, targets) in cases().items():
        tables[title] = summary(measure(module, contenders(module, inputs, targets), options.rounds))
        print(f"\n{title}")
        print(f"  {'':<12}{'ms a step':>12}{'time / single':>16}   quartiles")
        for name, row in tables[title].items():
            print(
                f"  {name:<12}{row['median_s'] * 1e3:>12.2f}{row['ratio']:>16.2f}   "
                f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(tables, indent=2) + "\n")


if __name__ == "__main__":
    main()
