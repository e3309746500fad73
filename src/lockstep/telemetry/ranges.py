"""Names for what a process does, as torch.profiler's trace and NVIDIA's tools show them: phases, and buckets.

``now`` is None unless somebody looks; then a name costs one comparison, and nothing is made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.autograd.profiler import record_function


class Range(AbstractContextManager["Range"]):
    """A name, from when it is made until it is closed, which is for the same thread to do.

    Args:
        name: What the thread does now.
        nvtx: Whether NVIDIA's tools are told, too.
    """

    def __init__(self, name: str, *, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._recorded = record_function(name)
        self._recorded.__enter__()
        if nvtx:
            torch.cuda.nvtx.range_push(name)

    def close(self) -> None:
        """End it."""
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._recorded.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Ranges:
    """Makes ranges.

    Args:
        nvtx: Whether they are NVTX ranges, too; only where there is CUDA.
    """

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx

    def open(self, name: str) -> Range:
        """Return a range that has begun."""
        return Range(name, nvtx=self._nvtx)


now: Ranges | None = None
"""Those of this process, while somebody looks."""

_NOTHING = nullcontext()


def around(name: str) -> AbstractContextManager[object]:
    """Return a context that has a name while somebody looks."""
    return _NOTHING if now is None else now.open(name)
