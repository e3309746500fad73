"""Peak memory of a contender, measured in fresh processes: in a shared one, contenders would stand on each other."""

import resource
import sys

import psutil
import torch

from lockstep.comm.world import init
from lockstep.study.compare.race import Race, devices_for, load
from lockstep.train.loop import Loop
from lockstep.train.settings import StrategyName

NUM_STEPS = 4
"""Enough for the optimizer's state, and for buckets to be built anew after the first step."""


def measure_peak(race: Race, strategy: StrategyName) -> tuple[int, ...]:
    """Train some steps and return this process's peak: by CUDA device, or one figure for a process on the CPU.

    On CUDA the most bytes that tensors held; on the CPU the growth of resident memory since the task's file was loaded.

    Collective for ``ddp`` and ``torch-ddp``: every rank.
    """
    torch.set_num_threads(race.num_threads[strategy])
    with init() as world:
        task = load(race.task)
        before_bytes = psutil.Process().memory_info().rss
        devices = devices_for(strategy, world, race.num_devices)
        loop = Loop(task, race.settings, world, strategy=strategy, devices=devices)
        try:
            for _ in range(NUM_STEPS):
                loop.step().loss.item()
        finally:
            loop.close()
        if world.device.type == "cuda":
            return tuple(torch.cuda.max_memory_allocated(device) for device in devices)
        return (max(_peak_rss_bytes() - before_bytes, 0),)


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
