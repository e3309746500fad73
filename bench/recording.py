"""What it costs to watch a run: a step of fit's loop that is watched, over one that nobody watches.

``watched`` is what every run has: each rank's figures, gathered once a second, and a picture of them drawn on rank
zero. ``recorded`` has the file of each rank as well (--run-dir). A round gives every contender one turn of a second, in
an order that rotates, in the same processes; what works beside the steps does so in its own turns only, once in each.
``again`` is the loop without anything once more: how well this machine can tell two things apart that are the same.
Wanted: ``watched`` under 1% of a step.

Usage: python -m bench.recording [--quick] [--rounds N] [--json FILE]
"""

import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.live_view import picture
from lockstep.telemetry.record import Event
from lockstep.telemetry.recorder import PERIOD_S
from lockstep.telemetry.sinks import Subscriber
from lockstep.train.recording import RunRecord
from lockstep.train.settings import FitSettings
from lockstep.train.trainer import Trainer

WIDTHS = {"small mlp": 128, "middle mlp": 384, "mlp": 768}
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


class Drawing(Subscriber):
    """Draws what a live view shows, and shows it to nobody."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def event(self, event: Event) -> None:
        """Keep the last events."""
        self._events = [*self._events[-2:], event]

    def update(self, snapshot: Snapshot) -> None:
        """Draw ``snapshot``."""
        picture(snapshot, self._events, width=100, height=40)

    def close(self) -> None:
        """Do nothing."""


class Contender:
    """A loop, watched or not, recorded or not."""

    def __init__(self, world: lockstep.World, width: int, *, watched: bool, folder: Path | None = None) -> None:
        task = make_task(width)
        settings = FitSettings(threads=1, run_dir=folder)
        self._loop = Trainer(task, settings, world, strategy="ddp", devices=[world.device])
        self._record = RunRecord(task, settings, world, self._loop, num_steps=10**9) if watched else None
        if self._record is not None:
            self._record.deliver(Drawing())

    def turn(self, num_steps: int) -> float:
        """Return the seconds of a step on the slowest rank. Collective: every rank."""
        slowest(0.0)
        began = time.perf_counter()
        for _ in range(num_steps):
            if self._record is None:
                self._loop.step()
            else:
                self._record.step(self._loop.step())
        return slowest(time.perf_counter() - began) / num_steps

    def close(self) -> None:
        """End what still runs."""
        if self._record is not None:
            self._record.close()
        self._loop.close()


def measure(width: int, num_rounds: int, turn_s: float, folder: str) -> Rounds:
    """Return the seconds of a step, a round each, by contender. Collective: every rank."""
    with lockstep.init(backend="gloo") as world:
        contenders = {
            "off": Contender(world, width, watched=False),
            "again": Contender(world, width, watched=False),
            "watched": Contender(world, width, watched=True),
            "recorded": Contender(world, width, watched=True, folder=Path(folder)),
        }
        for contender in contenders.values():
            contender.turn(WARM_UP_STEPS)
        count = max(4, math.ceil(turn_s / contenders["off"].turn(50)))
        turns = {name: partial(contender.turn, count) for name, contender in contenders.items()}
        seconds = run_rounds(turns, num_rounds, f"width {width}", shown=world.is_rank_zero)
        for contender in contenders.values():
            contender.close()
        return seconds


def main() -> None:
    options = parser(__doc__, rounds=40).parse_args()
    num_rounds, turn_s = (3, 0.4) if options.quick else (options.rounds, PERIOD_S)

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
