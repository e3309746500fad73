"""What recording a run costs: a step of fit's loop with every rank's record (--run-dir), over one without.

A round gives every contender one short turn, in an order that rotates, in the same processes. ``again`` is the loop
without a record once more: how well this machine can tell two things apart that are the same. Wanted: under 1% of a
step.

Usage: python -m bench.recording [--quick] [--rounds N] [--json FILE]
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize
from lockstep.telemetry.record.machine import MachineSampler
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.loop import Loop
from lockstep.train.recording import Recorder
from lockstep.train.settings import Settings

WIDTHS = {"small mlp": 128, "mlp": 768}
NUM_RANKS = 2
WARM_UP_STEPS = 10


def make_task(width: int) -> lockstep.Task:
    """Return a task on random numbers; its steps take a millisecond or some tens, by ``width``."""

    def network() -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))

    def samples() -> TensorDataset:
        return TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return lockstep.Task(
        model=network,
        dataset=samples,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        global_batch_size=128,
    )


class Contender:
    """A loop, recorded or not."""

    def __init__(self, world: lockstep.World, width: int, folder: Path | None) -> None:
        self._loop = Loop(make_task(width), Settings(threads=1), world, strategy="ddp", devices=[world.device])
        self._recorder = None
        if folder is not None:
            path = folder / f"rank-{world.rank}.jsonl"
            writer = LineWriter(path, fresh=True, sample=MachineSampler([world.device]))
            self._recorder = Recorder(self._loop, writer)

    def turn(self, num_steps: int) -> float:
        """Return the seconds of a step on the slowest rank. Collective: every rank."""
        slowest(0.0)
        began = time.perf_counter()
        for _ in range(num_steps):
            if self._recorder is None:
                self._loop.step()
            else:
                self._recorder.begin()
                self._recorder.step(self._loop.step())
        return slowest(time.perf_counter() - began) / num_steps

    def close(self) -> None:
        """End the thread that writes."""
        if self._recorder is not None:
            self._recorder.close()


def measure(width: int, num_rounds: int, turn_s: float, folder: str) -> Rounds:
    """Return the seconds of a step, a round each, by contender. Collective: every rank."""
    with lockstep.init(backend="gloo") as world:
        contenders = {
            "off": Contender(world, width, None),
            "again": Contender(world, width, None),
            "recorded": Contender(world, width, Path(folder)),
        }
        for contender in contenders.values():
            contender.turn(WARM_UP_STEPS)
        count = max(4, math.ceil(turn_s / contenders["off"].turn(10)))
        turns = {name: (lambda each=each: each.turn(count)) for name, each in contenders.items()}  # type: ignore[misc]
        seconds = run_rounds(turns, num_rounds, f"width {width}", shown=world.is_rank_zero)
        for contender in contenders.values():
            contender.close()
        return seconds


def main() -> None:
    options = parser(__doc__, rounds=60).parse_args()
    num_rounds, turn_s = (5, 0.05) if options.quick else (options.rounds, 0.2)

    def measure_all() -> dict[str, Any]:
        figures = {}
        for name, width in WIDTHS.items():
            with tempfile.TemporaryDirectory() as folder:
                arguments = (width, num_rounds, turn_s, folder)
                ranks = lockstep.launch(measure, *arguments, devices=NUM_RANKS, timeout_s=SECTION_TIMEOUT_S)
            figures[name] = summarize(ranks[0])
            show(f"{name}: {NUM_RANKS} ranks, {num_rounds} rounds", ranks[0], ("off",))
        return {"models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
