"""Peak memory of a rank that trains, for every contender in a launch of its own, on two ranks.

Measured in each rank after libraries are imported and the ranks have met, over the model's making, warm-up and some
steps more; what counts is the rank that needs most. MiB:

    RSS      the peak of resident memory, less what was resident before; what ranks share counts in each of them
    PSS      the most that smaps_rollup told between the parts of the steps, less what it told before: memory that ranks
             share counts in equal parts, so that the sum over the ranks is what the machine must have.
    tensors  the most that torch's CPU allocator had handed out at one time, in a run of its own with torch's profiler,
             plus the shared memory that this rank made its part of

A run is repeated, in an order that rotates; the median counts. bench/contenders.py says what the contenders are. ``dp``
is one process with both replicas, whose figures stand for both ranks' together.

Usage: python -m bench.memory [--quick] [--rounds N] [--json FILE]
"""

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.contenders import MAKE, join_ranks, make_trainee, missing
from bench.harness import SECTION_TIMEOUT_S, order_of_round, parser, progress, record, slowest
from bench.models import MODELS
from lockstep import init, launch
from lockstep.study.common import Spread, peak_bytes, reset_peak

NUM_RANKS = 2
NUM_STEPS = 6
MIB = 2**20
TRAINED = ("wide mlp", "gpt")
"""One whose memory is parameters, gradients and what the optimizer keeps; one that keeps activations as well."""
KINDS = ("RSS", "PSS", "tensors")


def measure(contender: str, name: str, counted: bool) -> dict[str, float]:
    """Return this rank's MiB: resident memory or, if ``counted``, what tensors held. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo"):
        warm_libraries(contender)
        ranks = join_ranks(MODELS[name])
        # Once around, so that what the groups take at the first call does not count.
        for group in (ranks.gloo, ranks.shm):
            torch.distributed.all_reduce(torch.zeros(1), group=group)
        work = functools.partial(train, contender, name, ranks)
        found = of_tensors(work) if counted else of_process(work)
        slowest(0.0)
        return found


def warm_libraries(contender: str) -> None:
    """Import what the contender and the optimizer need: code is not what is measured."""
    if contender == "accelerate":
        import accelerate  # noqa: F401
    if contender == "fabric":
        import lightning_fabric  # noqa: F401
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def train(contender: str, name: str, ranks: Any) -> list[int]:
    """Make the model and train some steps; return the proportional set size after each."""
    trainee = make_trainee(contender, MODELS[name], ranks)
    sizes = []
    for _ in range(NUM_STEPS):
        if trainee is not None:
            trainee.step(ranks.batches[ranks.gloo.rank()])
        sizes.append(proportional_bytes())
    return sizes


def of_process(work: Any) -> dict[str, float]:
    before_pss = proportional_bytes()
    reset_peak()
    before_rss = peak_bytes()
    sizes = work()
    return {"RSS": (peak_bytes() - before_rss) / MIB, "PSS": (max(sizes) - before_pss) / MIB}


def of_tensors(work: Any) -> dict[str, float]:
    before = shared_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return {"tensors": (most + (shared_bytes() - before) / torch.distributed.get_world_size()) / MIB}


def proportional_bytes() -> int:
    """Return the resident memory of this process, what it shares divided by the number of those who share it."""
    return status_bytes("smaps_rollup", "Pss")


def shared_bytes() -> int:
    """Return how much of shared memory this process has touched."""
    return status_bytes("status", "RssShmem")


def status_bytes(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self", file).read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/{file} does not tell {name}"
    return int(found[1]) * 1024


def main() -> None:
    options = parser(__doc__, rounds=3, meaning="launches of each contender").parse_args()
    num_rounds, trained = (1, TRAINED[:1]) if options.quick else (options.rounds, TRAINED)
    absent = missing()
    contenders = [name for name in MAKE if name not in (*absent, "single")]
    jobs = [
        (contender, name, counted)
        for index in range(num_rounds)
        for name in trained
        for contender in order_of_round(contenders, index)
        for counted in ((False, True) if index == 0 else (False,))
    ]

    def measure_all() -> dict[str, Any]:
        figures: dict[str, Any] = {name: {other: {} for other in contenders} for name in trained}
        for contender, name, counted in progress(jobs, "launches"):
            ranks = launch(measure, contender, name, counted, devices=NUM_RANKS, timeout_s=SECTION_TIMEOUT_S)
            for kind in ranks[0]:
                worst = max(rank[kind] for rank in ranks)
                figures[name][contender].setdefault(kind, []).append(worst)
        for name in trained:
            show(name, figures[name])
        return {"missing": absent, "mib": figures}

    record(options.json, measure_all)


def show(title: str, figures: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n{title}: MiB of the rank that needs most" + "".join(f"\n{'':<16}" + "".join(f"{k:>24}" for k in KINDS)))
    for contender, kinds in figures.items():
        cells = ""
        for kind in KINDS:
            spread = Spread.of(kinds[kind])
            cells += f"{spread.median:10.1f} ({spread.low:5.1f}-{spread.high:5.1f})"
        print(f"  {contender:<14}{cells}", flush=True)


if __name__ == "__main__":
    main()
