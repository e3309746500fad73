"""Names for what a process does, as torch.profiler's trace and NVIDIA's tools show them: phases, and buckets.

``now`` is None unless somebody profiles; then a name costs one comparison, and nothing is made.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.autograd.profiler import record_function


class Ranges:
    """Makes ranges.

    Args:
        nvtx: The module of that name if they are to be NVTX ranges, too.
    """

    def __init__(self, *, nvtx: Any) -> None:
        self._nvtx = nvtx

    def open(self, name: str) -> ExitStack:
        """Return a range that has begun; closing it, which is for the same thread to do, ends it."""
        opened = ExitStack()
        opened.enter_context(record_function(name))
        if self._nvtx:
            self._nvtx.range_push(name)
            opened.callback(self._nvtx.range_pop)
        return opened


# Those of this process, while somebody profiles.
now: Ranges | None = None

_NOTHING = nullcontext()


def around(name: str) -> AbstractContextManager[object]:
    """Return a context that has a name while somebody profiles."""
    return _NOTHING if now is None else now.open(name)
