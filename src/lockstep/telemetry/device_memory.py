"""What this process holds on its GPUs, by the figures of torch's allocator: no call of the driver, none waits."""

from __future__ import annotations

import contextlib
from typing import Any

from lockstep.telemetry.imported import imported


def device_memory() -> list[tuple[str, int, int, int]]:
    """Return for each GPU in use its name and the bytes in tensors, taken at most, and there; see `DeviceMemory`."""
    cuda = imported("torch.cuda")
    found = []
    if getattr(cuda, "_initialized", False):
        with contextlib.suppress(Exception):  # a device that has failed
            for index in range(cuda.device_count()):
                figures: Any = cuda.memory_stats_as_nested_dict(index)
                taken = figures["reserved_bytes"]["all"]["peak"] if figures else 0
                if taken:
                    held = figures["allocated_bytes"]["all"]["current"]
                    found.append((f"cuda:{index}", held, taken, cuda.get_device_properties(index).total_memory))
    return found
