"""How many samples a batch holds, as far as it shows: the length of its first dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.parallel.ddp.outputs import find_tensors


def num_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return the length of the first dimension of the first tensor in ``batch``; 0 if there is none.

    Args:
        batch: As a loader gives it, or the arguments of a forward.
        batch_size: What the loader was asked for: a list of so many items is one of samples.
    """
    if isinstance(batch, (list, tuple)) and batch:
        first = batch[0]
        if isinstance(first, Tensor) and first.dim() and batch_size is not None and first.shape[0] == batch_size:
            return batch_size  # the usual case
        if isinstance(first, (list, tuple)):
            return len(first)
        if len(batch) == batch_size:
            return batch_size
    elif isinstance(batch, Mapping) and batch:
        first = next(iter(batch.values()))
        if isinstance(first, (list, tuple)) and not any(isinstance(item, Tensor) for item in batch.values()):
            return len(first)
    tensor = next((found for found in find_tensors(batch) if found.dim()), None)
    return 0 if tensor is None else tensor.shape[0]
