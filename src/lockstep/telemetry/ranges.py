"""Named ranges of phases and buckets for torch.profiler and NVIDIA's tools.

``now`` is None unless the process is being profiled; then a range costs one comparison.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.autograd.profiler import record_function


class Ranges:
    """Opens ranges.

    Args:
        nvtx: The module of that name, to also open NVTX ranges; or None.
    """

    def __init__(self, *, nvtx: Any) -> None:
        self._nvtx = nvtx

    def open(self, name: str) -> ExitStack:
        """Begin a range; close the result in the same thread to end it."""
        opened = ExitStack()
        opened.enter_context(record_function(name))
        if self._nvtx:
            self._nvtx.range_push(name)
            opened.callback(self._nvtx.range_pop)
        return opened


# Set while this process is being profiled.
now: Ranges | None = None

_NOTHING = nullcontext()


def around(name: str) -> AbstractContextManager[object]:
    """Return a context that is a named range while the process is being profiled."""
    return _NOTHING if now is None else now.open(name)
