"""What the test session and a worker of its pool say to each other."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One function to run on one rank; ``payload`` is the cloudpickled ``(fn, args)``."""

    payload: bytes
    rank: int
    world_size: int
    store_path: str
    group_timeout_s: float
    warnings: str


@dataclass(frozen=True)
class Reply:
    """How a call ended; ``payload`` is the cloudpickled result or, if it failed, the exception."""

    failed: bool
    payload: bytes
    trace: str
    ended_at: float
    """``time.monotonic()``, which all processes of a machine share: the smallest one failed first."""


@dataclass(frozen=True)
class Outcome:
    """The result of a rank, or the error that it raised."""

    rank: int
    result: Any
    error: BaseException | None
    ended_at: float


READY = "ready"
"""A worker waits for its first call."""
IDLE = "idle"
"""A worker has torn its process group down and waits for the next call."""
MOST_BYTES = 1 << 20
"""Of a message to the process that workers are forked off."""
