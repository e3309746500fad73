"""The folder for checkpoints: can it be written, how fast, and is there room?"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import GIB, MIB, size

_SLOW_BYTES_PER_S = 50 * MIB
_LONG_S = 2.0
_FEW_BYTES = GIB
_KEPT = 3
"""Checkpoints that lie there at a time: two that are kept, and the one being written."""

_EXAMPLE_BYTES = 1_200_000_000
"""Weights and Adam's state of 100 million parameters."""


@dataclass(frozen=True)
class DiskFacts:
    """One folder.

    Attributes:
        folder: As it was named.
        problem: Why nothing can be written there; ``None`` if it can.
        filesystem: Its kind, such as ``ext4``.
        free_bytes: Left there.
        written_bytes: That the measurement wrote, down to the disk.
        seconds: That this took.
        checkpoint_bytes: Weights and optimizer state, where a task tells.
    """

    folder: str
    problem: str | None = None
    filesystem: str = ""
    free_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    checkpoint_bytes: int | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """How fast it writes; ``None`` if that was not measured."""
        return self.written_bytes / self.seconds if self.written_bytes and self.seconds > 0 else None


def look(facts: DiskFacts) -> list[Finding]:
    """Return what is wrong with the folder."""
    if facts.problem is not None:
        return [
            Finding(
                Kind.CHECKPOINT_FOLDER,
                Severity.HANG,
                f"Nothing can be written to {facts.folder}: {facts.problem}.",
                "The run ends when it writes its first checkpoint.",
                "Name a folder that can be written.",
                "lockstep train TASK.py --checkpoint ~/checkpoints",
            )
        ]
    found = []
    if facts.filesystem in ("tmpfs", "ramfs"):
        found.append(
            Finding(
                Kind.CHECKPOINT_FOLDER,
                Severity.WRONG,
                f"{facts.folder} lies in memory ({facts.filesystem}).",
                "Checkpoints are gone with the next start of the machine or the container, and take memory till then.",
                "Name a folder on a disk.",
                "lockstep train TASK.py --checkpoint ~/checkpoints",
            )
        )
    return [*found, *_full(facts), *_slow(facts)]


def seen(facts: DiskFacts) -> str:
    """Say in a line how fast and how full it is."""
    if facts.problem is not None:
        return f"{facts.folder}: {facts.problem}"
    speed = facts.bytes_per_s
    kind = f" ({facts.filesystem})" if facts.filesystem else ""
    measured = f", writes {size(speed)}/s ({size(facts.written_bytes)} measured)" if speed else ""
    return f"{facts.folder}{kind}: {size(facts.free_bytes)} free{measured}"


def _full(facts: DiskFacts) -> list[Finding]:
    needed = _KEPT * facts.checkpoint_bytes if facts.checkpoint_bytes else _FEW_BYTES
    if facts.free_bytes >= needed:
        return []
    whose = f"{_KEPT} checkpoints of {size(facts.checkpoint_bytes)}" if facts.checkpoint_bytes else "even one model"
    return [
        Finding(
            Kind.DISK_FULL,
            Severity.HANG,
            f"{facts.folder} has {size(facts.free_bytes)} left, too little for {whose}.",
            "The run ends when a checkpoint no longer fits.",
            "Make room, or name another folder.",
            "df -h  # then: lockstep train TASK.py --checkpoint DIR",
        )
    ]


def _slow(facts: DiskFacts) -> list[Finding]:
    speed = facts.bytes_per_s
    if speed is None or speed >= _SLOW_BYTES_PER_S:
        return []
    num_bytes = facts.checkpoint_bytes or _EXAMPLE_BYTES
    whose = "of this task" if facts.checkpoint_bytes else "of 100 million parameters with Adam"
    seconds = num_bytes / speed
    if seconds < _LONG_S:
        return []
    return [
        Finding(
            Kind.DISK_SLOW,
            Severity.SLOW if facts.checkpoint_bytes else Severity.NOTE,  # without a task: of a size made up
            f"{facts.folder} takes {size(speed)}/s, measured with {size(facts.written_bytes)}.",
            f"A checkpoint {whose} ({size(num_bytes)}) takes {seconds:.0f} s to write; the next one waits for it.",
            "Write to a disk of this machine, or less often.",
            "lockstep train TASK.py --checkpoint /PATH/ON/LOCAL/DISK --checkpoint-every 1000",
        )
    ]
