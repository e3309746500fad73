"""Is this checkout slower than an older commit? Training steps of both, turn about, in at most five minutes.

The older commit's `src` is unpacked and its C library is compiled. Each version has two ranks of its own, which sleep
while it is not their turn. All ranks run the contenders of this file, on the models of bench/models.py, with the fused
AdamW and one core a rank:

    none         no synchronisation at all: the same code in both versions, so it shows the noise
    ours         lockstep.DistributedDataParallel on shm
    ours-zero    the same with lockstep.ZeroRedundancyOptimizer

A round gives each version one turn of a few steps; every second round runs backwards. A turn lasts as long as its
slower rank takes. The ranks are started anew several times, as where a process lies in memory has a share in its speed.
For each contender and model: the time of a step with this checkout over that with the older commit, with the range that
holds the true median with 90% certainty, and the geometric mean over the models.

Exit status: 0, or 1 if a contender is slower by 3% on a model or in the geometric mean, and its range is beyond 1.

Usage: python -m bench.versions COMMIT [--quick] [--rounds N] [--only MODEL] [--contender NAME] [--json FILE]
"""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.models import MODELS, Batch, loss_of

REPO = Path(__file__).parents[1]
Rounds = dict[str, list[float]]
NUM_RANKS = 2
WARM_UP_STEPS = 12
CONTENDERS = ("none", "ours", "ours-zero")
OLD, NEW = "old", "new"
LOSS = 1.03
"""What counts as slower."""
STARTS = 3
"""How often the ranks are started anew."""
Seconds = dict[str, dict[str, Rounds]]
"""Of a step, by model, contender and version; one a round."""


class Plan(NamedTuple):
    """The rounds of each start, and about how long a turn is."""

    num_rounds: int
    turn_s: float


# --- a rank, which runs with the `src` of either version: only public names of Lockstep -------------------------------


def make(contender: str, model: nn.Module) -> Callable[[Batch], None]:
    """Return a step of training."""
    import lockstep

    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    wrapped: nn.Module = model
    if contender != "none":
        wrapped = lockstep.DistributedDataParallel(model)
    optimizer: Any
    if contender == "ours-zero":
        optimizer = lockstep.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, shard_gradients=True, **options
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()

    return step


def serve() -> None:
    """Take turns: a line names the number of steps, the contender and the model; the answer is a step's seconds."""
    import lockstep

    torch.set_num_threads(1)
    trainees: dict[tuple[str, str], tuple[Callable[[Batch], None], Batch]] = {}
    with lockstep.init(backend="shm") as world:
        for line in sys.stdin:
            count, contender, name = json.loads(line)
            if (contender, name) not in trainees:
                torch.manual_seed(1 + world.rank)
                batch = MODELS[name].batch()
                torch.manual_seed(0)
                trainees[contender, name] = make(contender, MODELS[name].model()), batch
            step, batch = trainees[contender, name]
            world.barrier()
            start = time.perf_counter()
            for _ in range(count):
                step(batch)
            print((time.perf_counter() - start) / count, flush=True)


# --- both versions ----------------------------------------------------------------------------------------------------


def unpack(commit: str, folder: Path) -> Path:
    """Return the ``src`` of ``commit`` in ``folder``, with its C library compiled.

    Raises:
        subprocess.CalledProcessError: There is no such commit, or no compiler.
    """
    archive = subprocess.run(["git", "archive", commit], cwd=REPO, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "src"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Ranks:
    """The ranks of one version."""

    def __init__(self, src: Path) -> None:
        place = {"WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = free_port()
        environ = {
            **os.environ,
            "PYTHONPATH": f"{src}{os.pathsep}{REPO}",
            **{key: str(it) for key, it in place.items()},
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # to compile all again at each start takes seconds
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from bench.versions import serve; serve()"],
                cwd=src,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(NUM_RANKS)
        ]

    def turn(self, count: int, contender: str, name: str) -> float:
        """Return the seconds of one of ``count`` steps on the slower rank.

        Raises:
            RuntimeError: A rank has ended.
        """
        answers = []
        with contextlib.suppress(BrokenPipeError):
            for process in self.processes:
                assert process.stdin is not None and process.stdout is not None
                print(json.dumps([count, contender, name]), file=process.stdin, flush=True)
            answers = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not answers or not all(answers):
            raise RuntimeError("A rank has ended; its error is above.")
        return max(map(float, answers))

    def end(self) -> None:
        """End them."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(sources: dict[str, Path], names: list[str], contenders: list[str], plan: Plan, seconds: Seconds) -> None:
    """Start the ranks of both versions, take their turns, and add the seconds of a step of each to ``seconds``."""
    from bench.harness import order_of_round

    ranks: dict[str, Ranks] = {}
    try:
        for version, src in sources.items():
            ranks[version] = Ranks(src)
        for name, contender in product(names, contenders):
            for each in ranks.values():
                each.turn(WARM_UP_STEPS, contender, name)
            count = max(2, round(plan.turn_s / ranks[NEW].turn(3, contender, name)))
            for index in range(plan.num_rounds):
                for version in order_of_round([OLD, NEW], index):
                    seconds[name][contender][version].append(ranks[version].turn(count, contender, name))
    finally:
        for each in ranks.values():
            each.end()


def show(contender: str, seconds: dict[str, Rounds]) -> list[str]:
    """Print the ratios of a contender, by model; return on what it is slower."""
    from lockstep.study.common import Spread, paired_ratio

    rounds = {name: zip(found[NEW], found[OLD], strict=True) for name, found in seconds.items()}
    logs = zip(*([math.log(new / old) for new, old in each] for each in rounds.values()), strict=True)
    found = {"all": Spread.of([math.exp(sum(each) / len(each)) for each in logs])}
    found |= {name: paired_ratio(each[NEW], each[OLD]) for name, each in seconds.items()}
    print(f"  {contender}")
    for name, ratio in found.items():
        print(f"    {name:<14}{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True)
    lost = [name for name, ratio in found.items() if ratio.median >= LOSS and ratio.low > 1]
    return [] if contender == "none" else [f"{contender} on {name}" for name in lost]


def main() -> int:
    from bench.harness import parser, progress, record

    made = parser(__doc__, rounds=10, meaning=f"turns of each contender, in each of {STARTS} starts")
    made.add_argument("commit", help="the older one")
    made.add_argument("--only", choices=MODELS, action="append", help="this model, not all; may be repeated")
    made.add_argument("--contender", choices=CONTENDERS, action="append", help="this one, not all; may be repeated")
    options = made.parse_args()
    plan = Plan(2, 0.02) if options.quick else Plan(options.rounds, 0.12)
    contenders, names = list(options.contender or CONTENDERS), options.only or list(MODELS)
    slower: list[str] = []

    def measure_all() -> dict[str, Any]:
        seconds: Seconds = {name: {each: {OLD: [], NEW: []} for each in contenders} for name in names}
        with tempfile.TemporaryDirectory() as folder:
            sources = {OLD: unpack(options.commit, Path(folder)), NEW: REPO / "src"}
            for _ in progress(range(STARTS), "starts of the ranks"):
                measure(sources, names, contenders, plan, seconds)
        print(f"a step with this checkout over that with {options.commit}; {STARTS} times {plan.num_rounds} rounds")
        for each in contenders:
            slower.extend(show(each, {name: found[each] for name, found in seconds.items()}))
        print(f"Slower by 3%: {', '.join(slower)}." if slower else "Nothing is slower by 3%.")
        return {"commit": options.commit, "seconds": seconds}

    record(options.json, measure_all)
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
