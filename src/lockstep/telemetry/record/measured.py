"""What a step took, in seconds, whoever measured it."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """Seconds of one step by what they went into; the names are those of ``STEP`` in names.py."""

    total_s: float
    data_wait_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_s: float | None = None
    copy_s: float | None = None
    hidden_s: float | None = None


PART_NAMES = {
    "data_wait_s": "data wait",
    "forward_s": "forward",
    "backward_s": "backward",
    "exposed_s": "waiting for gradients",
    "optimizer_s": "optimizer",
}
"""What parts of a step are called in sentences."""
