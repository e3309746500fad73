"""Reading a whole micro-batch at once, for data sets where that is faster and gives the very same as one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from lockstep.data.tokens import TokenFiles

Collate = Callable[[list[Any]], Any]


def reader_at_once(samples: Any, collate: Collate | None) -> Callable[[list[int]], Any] | None:
    """Return what makes a collated batch of indices, or None if the samples are better read one by one.

    One by one is what holds in general: random numbers are set for each sample. So these are data sets that draw none:
    tensors, token files, and Hugging Face's.
    """
    if collate is None and type(samples) is TensorDataset:  # a subclass may index otherwise
        return lambda indices: [tensor[torch.tensor(indices)] for tensor in samples.tensors]
    if collate is None and type(samples) is TokenFiles:
        return samples.read_batch
    tables = sys.modules.get("datasets")  # whoever has such a data set has imported it
    # In other formats a row is of another dtype alone than among others, or is what a function of the user's makes it.
    if tables is not None and isinstance(samples, tables.Dataset) and samples.format["type"] in {None, "torch"}:
        return lambda indices: (collate or default_collate)(samples.__getitems__(indices))
    return None
