"""What a rank has to tell the others in a step, beside its losses: that it is to stop, or that something failed.

[Note: wishes]
A signal reaches the ranks in different steps, and a checkpoint is written by one of them in the background. So that
all act on it after the same step, each adds what it wants to the sums of the step's losses (`lockstep.train.tally`):
no exchange of its own, and the same verdict everywhere. What comes up after these sums have started travels with those
of the next step.
"""

from __future__ import annotations

from collections.abc import Callable


class Wishes:
    """What this rank wants; asked once a step.

    Attributes:
        stop_asked: Tells whether the run is to stop.
        failure_seen: Tells whether something failed beside the steps, such as a write to disk.
    """

    def __init__(self) -> None:
        self.stop_asked: Callable[[], bool] = _no
        self.failure_seen: Callable[[], bool] = _no

    @property
    def to_stop(self) -> bool:
        """Whether the run is to stop."""
        return self.stop_asked()

    @property
    def to_fail(self) -> bool:
        """Whether something failed."""
        return self.failure_seen()


def _no() -> bool:
    return False
