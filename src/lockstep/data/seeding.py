"""Random state as a function of where the run is, never of how it got there.

Nothing random survives a step: before each micro-batch, and before each sample that is fetched, the generators are
set from (seed, purpose, position). A run that was resumed, that is interleaved with another one, or that loads its
samples in four processes therefore draws the same numbers as one that was not.
"""

from __future__ import annotations

import random
import struct
from hashlib import blake2b

import numpy as np
import torch


def mix(*parts: int) -> int:
    """Return 63 well-mixed bits of ``parts``; a different order or count of parts gives different bits."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_cpu(value: int) -> None:
    """Set the generators of Python, numpy and torch's CPU."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


def seed_device(device: torch.device, value: int) -> None:
    """Set the generator of a CUDA device; the CPU's is set by `seed_cpu`."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(value)
