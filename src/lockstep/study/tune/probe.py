"""The memory that a micro-batch of some size needs, by a real step of so many samples a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.world import World
from lockstep.errors import OutOfMemory
from lockstep.study.compare.benchmark import peak_bytes, reset_peak
from lockstep.study.tune.values import Values, loop_settings, strategy_of
from lockstep.train.plan import PER_PROCESS
from lockstep.train.task import Task
from lockstep.train.trainer import Trainer

NUM_STEPS = 2
"""In the first the optimizer makes its state, and beside that the second runs."""


def probe(
    task: Task, base: Values, size: int, world: World, devices: Sequence[torch.device], *, before_bytes: int
) -> int | None:
    """Train with micro-batches of ``size`` samples; return this process's peak in bytes, None if it did not fit.

    Collective for strategies with a process for each device: every rank. Whether it fitted is the same on all.

    Args:
        task: What to train.
        base: The other settings.
        size: Samples of a micro-batch on a device.
        world: All ranks.
        devices: Of this process.
        before_bytes: What this process held before it trained anything, on a CPU.
    """
    shares = world.world_size if strategy_of(base) in PER_PROCESS else len(devices)
    values: Values = {**base, "accumulate": 1, "workers": 0, "global_batch_size": size * shares}
    values.pop("prefetch", None)
    on_cuda = world.device.type == "cuda"
    reset_peak()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    try:
        loop = Trainer(task, loop_settings(values), world, strategy=strategy_of(values), devices=devices)
    except torch.OutOfMemoryError:
        if strategy_of(base) in PER_PROCESS and world.world_size > 1:
            raise  # the others wait
        return None
    try:
        for _ in range(NUM_STEPS):
            loop.step().loss.item()
    except OutOfMemory:
        if strategy_of(base) in PER_PROCESS and world.world_size > 1:
            raise  # the others wait
        return None
    finally:
        loop.close()
    return torch.cuda.max_memory_allocated(world.device) if on_cuda else max(0, peak_bytes() - before_bytes)
