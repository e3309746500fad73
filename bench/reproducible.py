"""What the same bits cost: `--reproducible V` against an ordinary run, in time and memory, as V and the model grow.

Every contender trains the same task from the same weights: on one device in this process, then on two CPU ranks. A
round gives each of them one turn of some steps; the order rotates and every other round runs backwards, so that
whatever else the machine does hits all alike. A turn lasts as long as its slowest rank takes. "Ordinary" has the same
number of CPU threads as the others, one; on one device "all cores" is what a run without the mode would take.

For each contender the median time of a step, and its ratio to the ordinary run in the same rounds with the range that
holds the true median with 90% certainty. Then the peak of the resident memory, each in fresh processes.

Usage: python bench/reproducible.py [--quick] [--rounds N]
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Task, init, launch
from lockstep.comm.collectives import all_reduce
from lockstep.study.common import Spread, paired_ratio, peak_bytes, reset_peak
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer

BATCH_SIZE = 64
ORDINARY = "ordinary"
SHARDS = (2, 4, 8, 16, 32)
MEMORY_WIDTH = 2600
"""Of a multilayer perceptron with 14 million parameters, next to whose gradients nothing else counts for much."""


class Language(nn.Module):
    """A small transformer over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 128), nn.Linear(128, 96)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits at every place."""
        return self.head(self.blocks(self.embedding(tokens)))


def mlp(width: int) -> nn.Module:
    """Return a model with many parameters and little to compute."""
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def convolutions() -> nn.Module:
    """Return a model with batch norm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def tiny_layers() -> nn.Module:
    """Return a model whose step is mostly bookkeeping: 300 small parameters."""
    layers = [layer for _ in range(149) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(16, 10))


def pairs(*shape: int) -> TensorDataset:
    """Return random inputs with random classes."""
    return TensorDataset(torch.randn(4 * BATCH_SIZE, *shape), torch.randint(10, (4 * BATCH_SIZE,)))


def texts() -> TensorDataset:
    """Return random characters."""
    return TensorDataset(torch.randint(96, (4 * BATCH_SIZE, 32)), torch.randint(96, (4 * BATCH_SIZE, 32)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def make_task(model: Any, dataset: Any) -> Task:
    """Return a task with AdamW."""
    return Task(
        model=model,
        dataset=dataset,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch_size=BATCH_SIZE,
    )


TASKS = {
    "wide mlp, 7 million parameters": make_task(lambda: mlp(1792), lambda: pairs(256)),
    "transformer, 0.8 million": make_task(Language, texts),
    "cnn with batch norm, 57 thousand": make_task(convolutions, lambda: pairs(3, 16, 16)),
    "300 tiny layers, 41 thousand": make_task(tiny_layers, lambda: pairs(16)),
}


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    turn_s: float


class Alone:
    """A world of one that needs no process group."""

    rank, world_size, group = 0, 1, None


def settings(shards: int | None) -> Settings:
    """Return those of a contender."""
    return Settings(reproducible=shards, threads=1)


def slowest(seconds: float, world: Any) -> float:
    """Return the largest of all ranks' ``seconds``. Collective: every rank; also lets them leave together."""
    if world.group is None:
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64)
    all_reduce(value, group=world.group, op="max")
    return float(value)


def turn(loop: Trainer, num_steps: int, world: Any) -> float:
    """Train ``num_steps`` steps; return the seconds a step of the slowest rank."""
    slowest(0.0, world)
    start = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    return slowest(time.perf_counter() - start, world) / num_steps


def race(task: Task, strategy: Any, world: Any, plan: Plan) -> dict[str, list[float]]:
    """Return the seconds of a step, a round each, by contender. Collective for ``ddp``: every rank."""
    hows = {ORDINARY: settings(None), **{f"V={shards}": settings(shards) for shards in SHARDS}}
    if world.group is None:
        hows["all cores"] = Settings()
    device = torch.device("cpu")
    loops = {name: Trainer(task, how, world, strategy=strategy, devices=[device]) for name, how in hows.items()}
    for loop in loops.values():
        turn(loop, 3, world)
    num_steps = max(2, round(plan.turn_s / turn(loops[ORDINARY], 3, world)))
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(plan.rounds):
        shift = index // 2 % len(loops)
        names = [*loops][shift:] + [*loops][:shift]
        for name in reversed(names) if index % 2 else names:
            seconds[name].append(turn(loops[name], num_steps, world))
    for loop in loops.values():
        loop.close()
    return seconds


def race_ranks(name: str, plan: Plan) -> dict[str, list[float]]:
    """Race on ranks. Collective: every rank."""
    with init() as world:
        return race(TASKS[name], "ddp", world, plan)


def memory(shards: int | None) -> float:
    """Return the peak of a rank's resident memory over what it held before the model was made, in MiB."""
    with init() as world:
        task = make_task(lambda: mlp(MEMORY_WIDTH), lambda: pairs(256))
        reset_peak()
        before = psutil.Process().memory_info().rss
        strategy = "single" if world.world_size == 1 else "ddp"
        loop = Trainer(task, settings(shards), world, strategy=strategy, devices=[torch.device("cpu")])
        for _ in range(4):
            loop.step()
        loop.close()
        return (peak_bytes() - before) / 2**20


def show(seconds: dict[str, list[float]]) -> None:
    """Print a line for each contender."""
    for name, values in seconds.items():
        line = f"    {name:<12}{Spread.of(values).median * 1e3:>9.2f} ms a step"
        if name != ORDINARY:
            ratio = paired_ratio(values, seconds[ORDINARY])
            line += f"   {ratio.median:.2f}x the ordinary time ({ratio.low:.2f}x to {ratio.high:.2f}x)"
        print(line, flush=True)


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contender (12)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds, to see that the script runs")
    options = parser.parse_args()
    plan = Plan(3, 0.02) if options.quick else Plan(options.rounds, 0.2)
    print(f"{plan.rounds} rounds, global batch {BATCH_SIZE}, torch {torch.__version__}")
    for name, task in TASKS.items():
        print(f"\n{name}\n  one device")
        show(race(task, "single", Alone, plan))
        print("  two ranks")
        show(launch(race_ranks, name, plan, devices=2)[0])
    parameters = sum(parameter.numel() for parameter in mlp(MEMORY_WIDTH).parameters())
    size_mib = parameters * 4 / 2**20
    print(f"\npeak memory of a rank, {parameters / 1e6:.0f} million parameters ({size_mib:.0f} MiB in fp32)")
    for num_ranks in (1, 2):
        ordinary = max(launch(memory, None, devices=num_ranks))
        print(f"  {num_ranks} rank{'s' * (num_ranks > 1)}: ordinary {ordinary:.0f} MiB", flush=True)
        for shards in SHARDS:
            mib = max(launch(memory, shards, devices=num_ranks))
            print(
                f"    V={shards:<4}{mib:.0f} MiB: {(mib - ordinary) / size_mib:+.2f} of the parameters' size",
                flush=True,
            )


if __name__ == "__main__":
    main()
