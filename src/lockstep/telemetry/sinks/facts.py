"""What sinks are told of a run when it begins, and the base of all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.telemetry.live.snapshot import SnapshotSink

Plain = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run that begins, or goes on.

    Attributes:
        name: Of its task.
        config: All that it depends on, by name: settings, sizes, versions, commits.
        first_step: Steps done before.
        is_fresh: Whether it begins; else it goes on where an earlier session ended.
        memory: Folder in which is kept what the next session needs to go on in the same places, if there is one.
    """

    name: str
    config: Mapping[str, Plain]
    first_step: int = 0
    is_fresh: bool = True
    memory: Path | None = None


class MetricsSink(SnapshotSink):
    """A sink that can say where its figures are to be seen."""

    @property
    @abstractmethod
    def where(self) -> str:
        """One line for whoever started the run."""
