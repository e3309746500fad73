"""Let code believe for a while that it is the only process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "1",
}


@contextmanager
def as_only_process() -> Iterator[None]:
    """Within, environment and torch.distributed say rank 0 of 1; who names a group is told the truth.

    What was read before stays as it was read. Other threads see the same.
    """
    true_rank, true_size = dist.get_rank, dist.get_world_size

    def rank(group: Any = None) -> int:
        return 0 if group is None else true_rank(group)

    def size(group: Any = None) -> int:
        return 1 if group is None else true_size(group)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {key: value for key, value in _ALONE.items() if key in os.environ}))
        for module in (dist, dist.distributed_c10d):
            stack.enter_context(patch.object(module, "get_rank", rank))
            stack.enter_context(patch.object(module, "get_world_size", size))
        yield
