"""The step that a rank is in, in memory that outlives it: a rank that is killed cannot say it any more."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_FORM = struct.Struct("qq")
"""The step in a loop of ours, counted from 1; optimizer steps done in any other. 0 for neither."""


def make_mark(run_dir: str, rank: int) -> memoryview:
    """Make the file ``run_dir/step-RANK``; what is written to the two numbers returned is in it at once."""
    path = os.path.join(run_dir, f"step-{rank}")
    with open(path, "wb+") as file:
        file.truncate(_FORM.size)
        return memoryview(mmap.mmap(file.fileno(), _FORM.size)).cast("q")


def read_mark(run_dir: Path, rank: int) -> tuple[int | None, int]:
    """Return the step that a rank is or was in, counted from 0, and the optimizer steps that it had done."""
    try:
        step, num_updates = _FORM.unpack((run_dir / f"step-{rank}").read_bytes())
    except (OSError, struct.error):
        return None, 0
    return (step - 1 if step else None), num_updates
