"""All-reduce of CPU tensors between processes of one host: the backend shm against Gloo, and against a plain copy.

Every contender takes the same number of bytes, from 1 kB to 256 MB, float32, summed. A round gives each of them one
turn of some calls; the order rotates and every other round runs backwards, so that whatever else the machine does hits
all alike. A turn lasts as long as its slowest rank takes.

    copy      every rank copies a tensor of so many bytes to another one of its own: the bound
    gloo      torch.distributed.all_reduce on Gloo
    shm       torch.distributed.all_reduce on shm
    in place  the same, of a tensor from lockstep's empty_buffer, which all ranks map

Up to 16 kB also *cold*: each call comes after a pause of 1 ms and a barrier on Gloo, so that ranks which sleep while
they wait have to be woken; the time is that of the slowest rank.

For each size: the median time of a call and, from the rounds' ratios with the range that holds the true median with 90%
certainty, how many times as fast as Gloo shm is, and what part of the copy's speed it reaches. The sums are checked.

Usage: python bench/all_reduce.py [--quick] [--rounds N] [--ranks N] [--json FILE]
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import init, launch
from lockstep.comm.collectives import empty_buffer
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.study.common import Spread, paired_ratio
from lockstep.telemetry.provenance import gather

SIZES = [1000, 4000, 16_000, 64_000, 250_000, 1_000_000, 4_000_000, 16_000_000, 100_000_000, 256_000_000]
CONTENDERS = ("copy", "gloo", "shm", "in place")
TURN_S = 0.05
COLD_BYTES, NUM_COLD, PAUSE_S = 16_000, 20, 0.001


def measure(sizes: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of a call on the slowest rank, a round each, by size and contender. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo") as world:
        group = dist.new_group(backend="shm")
        if world.world_size > 1 and not isinstance(group, ShmProcessGroup):
            raise RuntimeError("The ranks cannot share memory here, so there is nothing to measure.")
        return {size: of_size(size, rounds, group) for size in sizes}


def of_size(size_bytes: int, rounds: int, group: dist.ProcessGroup) -> dict[str, list[float]]:
    plain, target = torch.zeros(size_bytes // 4), torch.zeros(size_bytes // 4)
    shared = empty_buffer(size_bytes // 4, dtype=torch.float32, device=torch.device("cpu"), group=group).zero_()
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(plain),
        "gloo": lambda: dist.all_reduce(plain),
        "shm": lambda: dist.all_reduce(plain, group=group),
        "in place": lambda: dist.all_reduce(shared, group=group),
    }
    for tensor, summed in ((plain, calls["gloo"]), (plain, calls["shm"]), (shared, calls["in place"])):
        tensor.fill_(dist.get_rank() + 1.0)
        summed()
        expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
        if not bool((tensor == expected).all()):
            raise AssertionError(f"A sum of {size_bytes} bytes is wrong.")
        tensor.zero_()
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, min(1000, math.ceil(TURN_S / turn(call, 3))))
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    if size_bytes <= COLD_BYTES:
        seconds |= {f"{name}, cold": [] for name in CONTENDERS[1:]}
    for index in range(rounds):
        shift = index // 2 % len(CONTENDERS)
        order = [*CONTENDERS[shift:], *CONTENDERS[:shift]]
        for name in order[::-1] if index % 2 else order:
            seconds[name].append(turn(calls[name], counts[name]))
            if f"{name}, cold" in seconds:
                seconds[f"{name}, cold"].append(cold_turn(calls[name]))
    return seconds


def turn(call: Callable[[], object], count: int) -> float:
    """Return the seconds of one of ``count`` calls on the slowest rank. Collective: every rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    took = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def cold_turn(call: Callable[[], object]) -> float:
    """Return the median seconds of a call on the slowest rank, each behind a pause. Collective: every rank."""
    took = []
    for _ in range(NUM_COLD):
        time.sleep(PAUSE_S)
        took.append(turn(call, 1))
    return statistics.median(took)


def show(size_bytes: int, seconds: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: Spread.of(values) for name, values in seconds.items()}
    against_gloo = {name: paired_ratio(seconds["gloo"], seconds[name]) for name in ("shm", "in place")}
    against_copy = {name: paired_ratio(seconds["copy"], seconds[name]) for name in ("shm", "in place")}
    line = f"{size_bytes:>11,}" + "".join(f"{medians[name].median * 1e6:>12.1f}" for name in CONTENDERS)
    for name in ("shm", "in place"):
        ratio, part = against_gloo[name], against_copy[name]
        line += f"   {ratio.median:5.1f}x ({ratio.low:.1f} to {ratio.high:.1f}) {part.median:4.0%}"
    print(line, flush=True)
    if "gloo, cold" in seconds:
        for name in ("shm", "in place"):
            against_gloo[f"{name}, cold"] = paired_ratio(seconds["gloo, cold"], seconds[f"{name}, cold"])
        times = "".join(f"{medians[f'{name}, cold'].median * 1e6:>12.1f}" for name in CONTENDERS[1:])
        ratio = against_gloo["shm, cold"]
        print(f"{'cold':>11}{'':>12}{times}   {ratio.median:5.1f}x ({ratio.low:.1f} to {ratio.high:.1f})", flush=True)
    return {
        "seconds": {name: asdict(spread) for name, spread in medians.items()},
        "times_as_fast_as_gloo": {name: asdict(ratio) for name, ratio in against_gloo.items()},
        "part_of_the_copy": {name: asdict(ratio) for name, ratio in against_copy.items()},
        "rounds_s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options]", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=16, help="turns of each contender (16)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--quick", action="store_true", help="3 rounds of small sizes, to see that the script runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.rounds < 1 or options.ranks < 1:
        parser.error("--rounds and --ranks must be at least 1")
    rounds, sizes = (3, SIZES[:6]) if options.quick else (options.rounds, SIZES)
    provenance = gather()
    print(f"{options.ranks} ranks, {rounds} rounds, torch {torch.__version__}; microseconds, slowest rank")
    print(f"load of the machine before: {provenance.machine['load']} on {provenance.machine['cores']} cores")
    print(
        f"\n{'bytes':>11}"
        + "".join(f"{name:>12}" for name in CONTENDERS)
        + "   shm: times Gloo, of the copy;  in place"
    )
    measured = launch(measure, sizes, rounds, devices=options.ranks)[0]
    figures = {size: show(size, seconds) for size, seconds in measured.items()}
    if options.json:
        record = {
            "command": shlex.join(["python", "-m", "bench.all_reduce", *sys.argv[1:]]),
            "provenance": asdict(provenance),
            "sizes": figures,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
