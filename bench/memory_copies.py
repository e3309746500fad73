"""What a step pays for a copy of the state in memory after each step (--memory-checkpoint-every 1), over one without.

A round gives every contender one short turn, in an order that rotates, in the same processes, on two ranks of one host.
``again`` is the loop without copies once more: how well this machine can tell two things apart that are the same.

Usage: python -m bench.memory_copies [--quick] [--rounds N] [--json FILE]
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import lockstep
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize
from lockstep.train.memory_copies import MemoryCopies
from lockstep.train.settings import Settings
from lockstep.train.task import load_task
from lockstep.train.trainer import Trainer

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("digits", "gpt")
NUM_RANKS = 2
WARM_UP_STEPS = 3


class Contender:
    """A loop, with copies or not."""

    def __init__(self, world: lockstep.World, name: str, folder: Path | None) -> None:
        task = load_task(str(EXAMPLES / f"{name}.py"))
        self._loop = Trainer(task, Settings(threads=1), world, strategy="ddp", devices=[world.device])
        self._copies = None
        if folder is not None:
            self._copies = MemoryCopies(folder, world, is_writer=world.is_rank_zero, several_hosts=False)

    def turn(self, num_steps: int) -> float:
        """Return the seconds of a step on the slowest rank. Collective: every rank."""
        slowest(0.0)
        began = time.perf_counter()
        for _ in range(num_steps):
            self._loop.step()
            if self._copies is not None:
                self._loop.settle()
                self._copies.save(self._loop.state_dict(), step=self._loop.num_steps_done)
        return slowest(time.perf_counter() - began) / num_steps

    def close(self) -> None:
        """Let go of the memory."""
        self._loop.close()
        if self._copies is not None:
            self._copies.close()


def measure(name: str, num_rounds: int, turn_s: float, folder: str) -> Rounds:
    """Return the seconds of a step, a round each, by contender. Collective: every rank."""
    with lockstep.init() as world:
        contenders = {
            "off": Contender(world, name, None),
            "again": Contender(world, name, None),
            "copies": Contender(world, name, Path(folder)),
        }
        for contender in contenders.values():
            contender.turn(WARM_UP_STEPS)
        count = max(2, math.ceil(turn_s / contenders["off"].turn(WARM_UP_STEPS)))
        turns = {key: (lambda each=each: each.turn(count)) for key, each in contenders.items()}  # type: ignore[misc]
        seconds = run_rounds(turns, num_rounds, name, shown=world.is_rank_zero)
        for contender in contenders.values():
            contender.close()
        return seconds


def main() -> None:
    options = parser(__doc__, rounds=40).parse_args()
    num_rounds, turn_s = (5, 0.05) if options.quick else (options.rounds, 0.2)

    def measure_all() -> dict[str, Any]:
        figures = {}
        for name in NAMES:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                arguments = (name, num_rounds, turn_s, folder)
                ranks = lockstep.launch(measure, *arguments, devices=NUM_RANKS, timeout_s=SECTION_TIMEOUT_S)
            figures[name] = summarize(ranks[0])
            show(f"{name}: {NUM_RANKS} ranks, {num_rounds} rounds", ranks[0], ("off",))
        return {"examples": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
