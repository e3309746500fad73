"""Named ranges of phases and buckets in the traces of torch.profiler; see train/profiling.py."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

# Set while this process is being profiled; otherwise a range costs one comparison.
now = False

_NOTHING = nullcontext()


def around(name: str) -> AbstractContextManager[object]:
    """Return a context that is a named range while the process is being profiled."""
    return record_function(name) if now else _NOTHING
