"""What `prepare` costs: a training loop that it prepared, beside the same loop without it.

On one rank the other is the plain script. On two it is the loop that a person writes by hand, with
`DistributedDataParallel`, `DistributedSampler`, and a batch size that is divided. All batches are a multiple of the
number of ranks. The data are in memory: "tensors" is a `TensorDataset`, "items" a data set whose ``__getitem__``
computes a little, so that `prepare` seeds the generators for each sample. The model is a small MLP: the step is short,
and what `prepare` adds is large beside it.

A round gives each contender whole passes of its loop, in the same processes, in an order that rotates. A step is
loading, forward, loss, backward and SGD. For each: the median time of a step on the slowest rank, and the time divided
by that of the other, from the rounds' ratios, with the range that holds the true median with 90% certainty. "again" is
the other loop once more: how well this machine can tell two things apart that are the same.

Usage: python -m bench.prepared_loop [--quick] [--rounds N] [--json FILE]
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize

NUM_RANKS = (1, 2)
BATCH_SIZE, NUM_BATCHES = 64, 32
WIDTH = 128


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Normalises and flips a sample when it is read."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.inputs[index]
        sample = (sample - sample.mean()) / sample.std()
        return sample.flip(0) if torch.rand(()) < 0.5 else sample, self.labels[index]


Loop = tuple[nn.Module, Optimizer, Iterable[list[Tensor]]]


def parts(data: str) -> tuple[nn.Module, Optimizer, Dataset[Any]]:
    """Return model, optimizer and data set of the script, the same each time."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(BATCH_SIZE * NUM_BATCHES, WIDTH), torch.randint(10, (BATCH_SIZE * NUM_BATCHES,))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    samples: Dataset[Any] = TensorDataset(inputs, labels) if data == "tensors" else Items(inputs, labels)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), samples


def plain(data: str) -> Loop:
    """Make the script for one device."""
    model, optimizer, samples = parts(data)
    return model, optimizer, DataLoader(samples, BATCH_SIZE, shuffle=True)


def by_hand(data: str, world: lockstep.World) -> Loop:
    """Make the script that divides the batches itself. Collective: every rank."""
    model, optimizer, samples = parts(data)
    sampler: Any = lockstep.DistributedSampler(samples, seed=0)
    loader = DataLoader(samples, BATCH_SIZE // world.world_size, sampler=sampler)
    return lockstep.DistributedDataParallel(model), optimizer, loader


def prepared(data: str) -> Loop:
    """Make the script for one device, and prepare it. Collective: every rank."""
    made: Loop = lockstep.prepare(*plain(data))
    return made


def turn(loop: Loop, num_passes: int) -> float:
    """Return the seconds of a step on the slowest rank. Collective: every rank."""
    model, optimizer, loader = loop
    slowest(0.0)
    start = time.perf_counter()
    for _ in range(num_passes):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return slowest((time.perf_counter() - start) / (num_passes * NUM_BATCHES))


def measure(data: str, num_rounds: int, num_passes: int) -> Rounds:
    """Return the seconds of a step on the slowest rank, a round each, by contender. Collective: every rank."""
    torch.set_num_threads(1)
    with lockstep.init(backend="gloo") as world:
        make: Callable[[], Loop] = partial(by_hand, data, world) if world.world_size > 1 else partial(plain, data)
        other = "by hand" if world.world_size > 1 else "plain"
        loops = {other: make(), "again": make(), "prepared": prepared(data)}
        turns = {name: partial(turn, loop, num_passes) for name, loop in loops.items()}
        for warm_up in turns.values():
            warm_up()
        return run_rounds(turns, num_rounds, f"{data}, {world.world_size} ranks", shown=world.is_rank_zero)


def main() -> None:
    options = parser(__doc__, rounds=40).parse_args()
    num_rounds, num_passes = (3, 1) if options.quick else (options.rounds, 2)

    def measure_all() -> dict[str, Any]:
        figures: dict[str, dict[str, Any]] = {"tensors": {}, "items": {}}
        for data, of_data in figures.items():
            for num_ranks in NUM_RANKS:
                # The ranks have measured the same, as the slowest one counts.
                plan = measure, data, num_rounds, num_passes
                seconds = lockstep.launch(*plan, devices=num_ranks, timeout_s=SECTION_TIMEOUT_S)[0]
                of_data[str(num_ranks)] = summarize(seconds)
                show(f"{data}: {num_ranks} ranks, {num_rounds} rounds", seconds, ("plain", "by hand"))
        return {"data": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
