"""Training steps of contenders that have processes of their own, as programs have that swap one class for another.

bench/steps.py lets all contenders take turns in the same two processes, which is the sharper look at the engines; but
then what one of them does to its process, the others have too: Lockstep lets the C library keep the memory that a step
frees (src/lockstep/comm/process.py). Here each contender has two ranks of its own, which sleep while it is not
their turn. The turns are interleaved as there.

For each model: the median time of a step, and over that of no synchronisation and of torch's, with the range that holds
the true median with 90% certainty; then the page faults of a step, and the geometric mean over the models.

Usage: python -m bench.apart [--quick] [--rounds N] [--only MODEL] [--json FILE]
"""

import math
import resource
import statistics
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.contenders import MAKE, TIMEOUT, Ranks
from bench.harness import Rounds, parser, record, run_rounds, show, slowest, summarize, timed
from bench.models import MODELS
from lockstep.study.common import paired_ratio

CONTENDERS = ("none", "torch", "ours", "ours-zero")
NUM_RANKS = 2
WARM_UP_STEPS = 12


def measure(index: int, store: str, name: str, num_rounds: int, turn_s: float, kept: Any) -> None:
    """Take the turns of one rank of one contender. Collective: every rank of every contender."""
    torch.set_num_threads(1)
    world_size = NUM_RANKS * len(CONTENDERS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=world_size, timeout=TIMEOUT)
    mine = CONTENDERS[index // NUM_RANKS]
    groups = {contender: groups_of(place, contender) for place, contender in enumerate(CONTENDERS)}
    gloo, shm = groups[mine]
    workload = MODELS[name]
    torch.manual_seed(1 + index % NUM_RANKS)
    batch = workload.batch()
    torch.manual_seed(0)
    step = MAKE[mine](workload.model(), Ranks(gloo, shm, [batch]))
    for _ in range(WARM_UP_STEPS):
        step(batch)
    slowest(0.0)

    def turn(contender: str, count: int) -> float:
        slowest(0.0)
        return slowest(timed(lambda: step(batch), count) if contender == mine else 0.0)

    count = max(3, math.ceil(turn_s / turn("torch", 3)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    turns = {contender: lambda contender=contender: turn(contender, count) for contender in CONTENDERS}
    seconds = run_rounds(turns, num_rounds, name, shown=index == 0)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (num_rounds * count)
    all_faults: list[Any] = [None] * world_size
    dist.all_gather_object(all_faults, faults)
    if index == 0:
        kept["seconds"] = seconds
        kept["faults"] = {contender: all_faults[NUM_RANKS * place] for place, contender in enumerate(CONTENDERS)}
    dist.destroy_process_group()


def groups_of(place: int, contender: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make a contender's group on Gloo, and for ours one on shm. Collective: every rank of every contender."""
    members = list(range(NUM_RANKS * place, NUM_RANKS * (place + 1)))
    gloo = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
    shm = dist.new_group(members, backend="shm", timeout=TIMEOUT) if contender.startswith("ours") else gloo
    return gloo, shm


def run_model(name: str, num_rounds: int, turn_s: float) -> tuple[Rounds, dict[str, float]]:
    """Return the seconds of a step a round, and the page faults of a step, by contender."""
    with mp.get_context("spawn").Manager() as manager, tempfile.TemporaryDirectory() as folder:
        kept = manager.dict()
        arguments = (f"{folder}/store", name, num_rounds, turn_s, kept)
        mp.spawn(measure, arguments, nprocs=NUM_RANKS * len(CONTENDERS))
        return kept["seconds"], kept["faults"]


def main() -> None:
    made = parser(__doc__, rounds=15)
    made.add_argument("--only", choices=MODELS, action="append", help="this model, not all; may be repeated")
    options = made.parse_args()
    num_rounds, turn_s = (2, 0.02) if options.quick else (options.rounds, 0.25)

    def measure_all() -> dict[str, Any]:
        figures = {}
        speedups: dict[str, list[float]] = {"ours": [], "ours-zero": []}
        for name in options.only or MODELS:
            seconds, faults = run_model(name, num_rounds, turn_s)
            figures[name] = summarize(seconds) | {"faults": faults}
            show(f"{name}: {NUM_RANKS} ranks a contender, {num_rounds} rounds", seconds, ("none", "torch"))
            print("  page faults a step: " + ", ".join(f"{who} {count:,.0f}" for who, count in faults.items()))
            for who, found in speedups.items():
                found.append(1 / paired_ratio(seconds[who], seconds["torch"]).median)
        print("\ngeometric mean over the models, times as fast as torch's: ", end="")
        print(", ".join(f"{who} {statistics.geometric_mean(found):.2f}" for who, found in speedups.items()))
        return {"models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
