"""From which state a run goes on: the newest of those on disk and those in the memory of the hosts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.comm.collectives import broadcast_object
from lockstep.errors import CheckpointError
from lockstep.train import checkpoint
from lockstep.train.checkpoint import Checkpoints, State
from lockstep.train.memory_copies import MemoryCopies


@dataclass
class Resumed:
    """Where a state was found.

    Attributes:
        step: After how many steps it was taken; 0 if none was found.
        path: Of the checkpoint that it is from; None if it was in memory.
        passed_over: What is newer and damaged, each with why.
    """

    step: int = 0
    path: Path | None = None
    passed_over: list[str] = field(default_factory=list)

    def describe(self, num_steps: int) -> list[str]:
        """Return what the user should hear, in a run of so many steps."""
        lines = [f"passed over the checkpoint {why}" for why in self.passed_over]
        if self.step:
            lines.append(f"resumed after step {self.step} of {num_steps}{', from memory' if self.path is None else ''}")
        return lines


def newest_state(
    checkpoints: Checkpoints | None, copies: MemoryCopies | None, *, required: bool
) -> tuple[State | None, Resumed]:
    """Return the newest state that there is, the same on every rank, and where it was found.

    Checkpoints are not read if what is in memory is as new as they say that they are.

    Collective: every rank. Blocks until all have read it.

    Args:
        checkpoints: Those on disk, if there are any.
        copies: Those in memory, likewise.
        required: Whether one on disk must be there where none is in memory.

    Raises:
        CheckpointError: On every rank; see `Checkpoints.load`.
    """
    newest = None if copies is None else copies.newest()
    in_memory = None if newest is None else newest.step
    found = Resumed(passed_over=[] if copies is None else [*copies.passed_over])
    if checkpoints is not None and (in_memory is None or _newest_on_disk(checkpoints) > in_memory):
        try:
            state = checkpoints.load(required=required)
        except CheckpointError:
            if in_memory is None:
                raise
            state = None  # what is in memory is as good
        found.passed_over += checkpoints.passed_over
        if state is not None and (in_memory is None or state["num_steps_done"] > in_memory):
            found.step = state["num_steps_done"]
            found.path = checkpoints.path(found.step)
            return state, found
    if newest is None or in_memory is None:
        return None, found
    found.step = in_memory
    return newest.load(), found


def _newest_on_disk(checkpoints: Checkpoints) -> int:
    """Return the step of the newest checkpoint, as it says itself. Collective: every rank."""
    step = 0
    if checkpoints.world.is_rank_zero and not checkpoints.fresh:
        with contextlib.suppress(OSError):
            step = max(
                (each.step for each in checkpoint.find_checkpoints(checkpoints.folder) if each.problem is None),
                default=0,
            )
    found: int = broadcast_object(step, group=checkpoints.world.group, device=checkpoints.world.device)
    return found
