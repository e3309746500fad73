"""Peak memory of a contender, measured in fresh processes: in a shared one, contenders would stand on each other."""

import contextlib
import re
import resource
import sys
from pathlib import Path

import psutil
import torch

from lockstep.comm.world import init
from lockstep.study.compare.race import Race, devices_for, load
from lockstep.train.loop import Loop
from lockstep.train.settings import StrategyName

NUM_STEPS = 4
"""Enough for the optimizer's state, and for buckets to be built anew after the first step."""

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What proc(5) says to write to clear_refs so that the peak of resident memory starts again from the present."""


def measure_peak(race: Race, strategy: StrategyName) -> tuple[int, ...]:
    """Train some steps and return this process's peak: by CUDA device, or one figure for a process on the CPU.

    On CUDA the most bytes that tensors held; on the CPU the growth of resident memory since the task's file was loaded:
    data set, weights, gradients, optimizer, buckets, activations and what libraries take when first used.

    Collective for ``ddp`` and ``torch-ddp``: every rank.
    """
    torch.set_num_threads(race.num_threads[strategy])
    with init() as world:
        task = load(race.task)
        devices = devices_for(strategy, world, race.num_devices)
        reset_peak()
        before_bytes = psutil.Process().memory_info().rss
        loop = Loop(task, race.settings, world, strategy=strategy, devices=devices)
        try:
            for _ in range(NUM_STEPS):
                loop.step().loss.item()
        finally:
            loop.close()
        if world.device.type == "cuda":
            return tuple(torch.cuda.max_memory_allocated(device) for device in devices)
        return (max(peak_bytes() - before_bytes, 0),)


def reset_peak() -> None:
    """Start the peak of resident memory anew from what is held now, where the system can do so."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)


def peak_bytes() -> int:
    """Return the most resident memory that this process held: since the last `reset_peak` on Linux, else ever."""
    # Rather not getrusage: its peak cannot be reset, and begins with what the parent held when it forked.
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text() if _STATUS.exists() else "")
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
