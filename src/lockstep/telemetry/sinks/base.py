"""What a sink is, what it is given of a run when it begins, and what it remembers from one session to the next."""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.run_folder import read_object, replace_file
from lockstep.telemetry.metrics import Snapshot, SnapshotSink, evaluations, scalars

Plain = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class RunInfo:
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


SINK_STATE_FILE = "sinks.json"


class SinkState:
    """What a sink has given to its service: under which id, and up to which step.

    A run that goes on from a checkpoint does some steps again, with the same figures. Services want steps that only
    grow, so the state outlives the session where the run has a folder.

    Args:
        target: The sink, as ``log_to`` names it.
        run: Without a folder, nothing is remembered.

    Attributes:
        run_id: Under which the service knows the run; None before it does.
        last_step: The last step whose figures the service has; -1 before the first.
        last_evaluation: The step of the last evaluation that it has, likewise.
    """

    def __init__(self, target: str, run: RunInfo) -> None:
        self._target = target
        self._path = None if run.memory is None else run.memory / SINK_STATE_FILE
        self.run_id: str | None = None
        self.last_step = self.last_evaluation = -1
        if self._path is not None and not run.is_fresh:
            with suppress(KeyError, TypeError, ValueError):
                mine = read_object(self._path)[target]
                numbers = int(mine["last_step"]), int(mine["last_evaluation"])
                self.run_id, (self.last_step, self.last_evaluation) = str(mine["run_id"]), numbers

    def begin(self, run_id: str) -> None:
        """Remember that the service now knows the run as ``run_id``; of another run than before, it has no step."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.last_step = self.last_evaluation = -1
        self._write()

    def news(self, snapshot: Snapshot) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Yield what the service does not have yet: step, Unix time and values by name, evaluations first.

        Each is remembered once the next one is asked for, so what the service does not take is not.
        """
        for event, values in evaluations(snapshot):  # before the step: services refuse steps that go back
            if event.step > self.last_evaluation:
                yield event.step, event.time, values
                self.last_evaluation = event.step
        if snapshot.step > self.last_step:
            yield snapshot.step, snapshot.time, scalars(snapshot)
            self.last_step = snapshot.step
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            mine = {"run_id": self.run_id, "last_step": self.last_step, "last_evaluation": self.last_evaluation}
            with suppress(OSError):  # a full disk costs this memory, not the sink
                replace_file(self._path, json.dumps(read_object(self._path) | {self._target: mine}, indent=1))
