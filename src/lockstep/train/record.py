"""What a run tells of itself as it goes, to whoever records it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from typing_extensions import override

from lockstep.train.step_record import StepRecord

Event = Literal[
    "resume", "restart", "evaluation", "checkpoint", "skipped", "straggler", "spike", "remark", "stop", "error", "end"
]
"""See ``EVENTS`` in lockstep.telemetry.record.names."""


class Record(ABC):
    """Takes what happens in a run. Abstract; `lockstep.train.run_dir.make_record` returns one."""

    @abstractmethod
    def begin(self) -> None:
        """A step is about to begin."""

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """Take a step that has just ended on the host. Does not block."""

    @abstractmethod
    def pause(self) -> None:
        """Training stands still from now on, for the event that comes next."""

    @abstractmethod
    def event(self, event: Event, text: str) -> None:
        """Take an event, for which training stood still since `pause` if that was called. Does not block."""

    @abstractmethod
    def finish(self, event: Event, text: str) -> None:
        """Take notice that the run is over. Collective: every rank. Blocks for some small messages at most."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left. Blocks until the device is done, and some seconds at most for the disk."""


@final
class NoRecord(Record):
    """Of a run that is not recorded."""

    @override
    def begin(self) -> None: ...

    @override
    def step(self, record: StepRecord) -> None: ...

    @override
    def pause(self) -> None: ...

    @override
    def event(self, event: Event, text: str) -> None: ...

    @override
    def finish(self, event: Event, text: str) -> None: ...

    @override
    def close(self) -> None: ...
