"""What an all-reduce costs on a group: a handful of them, timed.

The shortest time counts: whatever else a machine does only makes one longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from lockstep.comm.collectives import Group, all_reduce, all_reduce_async
from lockstep.parallel.ddp.pipeline import Costs, fit_line

_SIZES_BYTES = (4 * 2**10, 2**18, 2**20, 2**22, 2**24)
_NUM_TIMES = 7
_WORK_S = 4e-3
"""How long the piece of work takes beside which an all-reduce is timed."""


def measure_costs(*, group: Group, device: torch.device) -> Costs:
    """Time all-reduces of several sizes, alone and beside other work. Collective: every rank. Blocks until complete.

    Returns:
        The same numbers on every rank: those of the slowest.
    """
    seconds: dict[int, float] = {}
    launch_s = handover_s = 0.0
    for size_bytes in _SIZES_BYTES:
        buffer = torch.zeros(size_bytes // 4, device=device)
        all_reduce(buffer, group=group)
        reduce = partial(all_reduce, buffer, group=group)
        seconds[size_bytes] = min(_time(reduce, device) for _ in range(_NUM_TIMES))
        if size_bytes == _SIZES_BYTES[0]:
            launches = [_time_launch(buffer, group, device) for _ in range(_NUM_TIMES)]
            launch_s = min(launched_s for launched_s, _ in launches)
            handover_s = max(min(finished_s for _, finished_s in launches) - seconds[size_bytes], 0.0)
    hidden = _measure_hidden(group, device)
    sizes = sorted(seconds)
    mine = [*(seconds[size_bytes] for size_bytes in sizes), launch_s, handover_s, -hidden]
    *slowest, launch_s, handover_s, exposed = _largest(mine, group, device)
    latency_s, bytes_per_s = fit_line(dict(zip(sizes, slowest, strict=True)))
    hidden = min(max(-exposed, -1.0), 1.0)
    return Costs(latency_s, bytes_per_s, min(launch_s, latency_s + handover_s), hidden, handover_s)


def _measure_hidden(group: Group, device: torch.device) -> float:
    """Return which part of an all-reduce costs nothing beside work on the device. Collective: every rank."""
    buffer = torch.zeros(_SIZES_BYTES[-2] // 4, device=device)
    weights, inputs = torch.full((1024, 1024), 1e-3, device=device), torch.ones(1024, 32, device=device)

    def multiply(times: int) -> None:  # as backward does: it reads much memory for what it computes
        for _ in range(times):
            torch.mm(weights, inputs)

    multiply(1)
    num_products = max(1, int(_WORK_S / max(_time(lambda: multiply(8), device) / 8, 1e-7)))
    num_products = int(_largest([float(num_products)], group, device)[0])

    def both() -> None:
        future = all_reduce_async(buffer, group=group)
        multiply(num_products)
        future.wait()

    alone, work, beside = [], [], []
    for _ in range(_NUM_TIMES):
        work.append(_time(lambda: multiply(num_products), device))
        alone.append(_time(lambda: all_reduce(buffer, group=group), device))
        beside.append(_time(both, device))
    return (min(work) + min(alone) - min(beside)) / min(*work, *alone)


def _time(action: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    started_s = time.perf_counter()
    action()
    _wait_for(device)
    return time.perf_counter() - started_s


def _time_launch(buffer: torch.Tensor, group: Group, device: torch.device) -> tuple[float, float]:
    """Return how long the host takes to start an all-reduce, and until it is over. Collective: every rank."""
    _wait_for(device)
    started_s = time.perf_counter()
    future = all_reduce_async(buffer, group=group)
    launched_s = time.perf_counter() - started_s
    future.wait()
    _wait_for(device)
    return launched_s, time.perf_counter() - started_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(values: list[float], group: Group, device: torch.device) -> list[float]:
    """Return the largest of all ranks' values, one by one. Collective: every rank."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    all_reduce(numbers, group=group, op="max")
    found: list[float] = numbers.tolist()
    return found
