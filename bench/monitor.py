"""What watching a plain loop costs: its step with `lockstep.monitor`, over one without, with torch's engine and ours.

A round gives every contender one short turn, in an order that rotates, in the same processes. ``again`` is the loop
without it once more: how well this machine can tell two things apart that are the same. ``watched`` is one with the
line, a loader that is seen and a loss that is recorded in each step. Wanted: under 1% of a step.

Usage: python -m bench.monitor [--quick] [--rounds N] [--json FILE]
"""

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize

WIDTHS = {"small mlp": 128, "mlp": 768}
ENGINES = {"torch-ddp": TorchDistributedDataParallel, "ddp": lockstep.DistributedDataParallel}
NUM_RANKS = 2
WARM_UP_STEPS = 20
BATCH = 64


class Contender:
    """A plain loop, watched or not."""

    def __init__(self, engine: str, width: int, folder: Path | None) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self._model = ENGINES[engine](nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._loader = DataLoader(TensorDataset(torch.randn(2048, 64), torch.randint(10, (2048,))), BATCH)
        self._watch = None
        if folder is not None:
            self._watch = lockstep.monitor(self._model, self._optimizer, self._loader, run_dir=folder)
        self._batches = self._forever()

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self._loader

    def turn(self, num_steps: int) -> float:
        """Return the seconds of a step on the slowest rank. Collective: every rank."""
        slowest(0.0)
        began = time.perf_counter()
        for _ in range(num_steps):
            inputs, labels = next(self._batches)
            loss = F.cross_entropy(self._model(inputs), labels)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._watch is not None:
                self._watch.loss(loss)
        return slowest(time.perf_counter() - began) / num_steps

    def close(self) -> None:
        """End the record."""
        if self._watch is not None:
            self._watch.close()


def measure(engine: str, width: int, num_rounds: int, turn_s: float, folder: str) -> Rounds:
    """Return the seconds of a step, a round each, by contender. Collective: every rank."""
    with lockstep.init(backend="gloo") as world:
        torch.set_num_threads(1)
        contenders = {
            "off": Contender(engine, width, None),
            "again": Contender(engine, width, None),
            "watched": Contender(engine, width, Path(folder)),
        }
        for contender in contenders.values():
            contender.turn(WARM_UP_STEPS)
        count = max(4, math.ceil(turn_s / contenders["off"].turn(10)))
        turns = {name: (lambda each=each: each.turn(count)) for name, each in contenders.items()}
        seconds = run_rounds(turns, num_rounds, f"{engine}, width {width}", shown=world.is_rank_zero)
        for contender in contenders.values():
            contender.close()
        return seconds


def main() -> None:
    options = parser(__doc__, rounds=60).parse_args()
    num_rounds, turn_s = (5, 0.05) if options.quick else (options.rounds, 0.2)

    def measure_all() -> dict[str, Any]:
        figures = {}
        for engine in ENGINES:
            for name, width in WIDTHS.items():
                with tempfile.TemporaryDirectory() as folder:
                    arguments = (engine, width, num_rounds, turn_s, folder)
                    ranks = lockstep.launch(measure, *arguments, devices=NUM_RANKS, timeout_s=SECTION_TIMEOUT_S)
                figures[f"{name}, {engine}"] = summarize(ranks[0])
                show(f"{name}, {engine}: {NUM_RANKS} ranks, {num_rounds} rounds", ranks[0], ("off",))
        return {"models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
