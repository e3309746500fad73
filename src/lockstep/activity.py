"""What this process is doing just now, for whoever asks from another thread; standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Activity:
    """The marks of one process.

    Attributes:
        mark: Where ``step`` and ``num_steps`` are written as well, for the launcher to find after a kill.
        phase: What of the step runs: ``loader``, ``forward``, ``backward``, ``optimizer``, ``evaluation`` ...
        bucket: The bucket whose reduction this rank waits for: its number and its parameters' names.
        num_calls: Calls of communication that went through groups which do not count them themselves.
        waited_s: Seconds that this rank has spent in collectives that block it, since it began.
        failure: The exception that ended this rank's part in the job, although its process may go on.
        held_up: The exception that will end this program, while a ``finally`` holds it up.
        on_failure: What to call with such an exception, at once: the launcher is to learn of it before peers notice.
        passing: File and line of objects of ``with`` that let exceptions pass; see telemetry/uncaught.py.
        wants_pace: Whether somebody reads ``pace``.
        pace: What the last steps took by phase, for the launcher to compare the ranks; see telemetry/stragglers.py.
        waits: Where the engine is to add when its own work of a step was done and when the step was over, for a loop
            that measures its phases itself; ``None`` if there is none.
    """

    __slots__ = (
        "_num_steps",
        "_step",
        "bucket",
        "failure",
        "held_up",
        "mark",
        "num_calls",
        "on_failure",
        "pace",
        "passing",
        "phase",
        "waited_s",
        "waits",
        "wants_pace",
    )

    def __init__(self) -> None:
        self.mark: memoryview | None = None
        self.step = None
        self.phase = ""
        self.bucket: tuple[int, Sequence[str]] | None = None
        self.num_steps = 0
        self.num_calls = 0
        self.waited_s = 0.0
        self.failure: str | None = None
        self.held_up: str | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        self.passing: set[tuple[str, int]] = set()
        self.wants_pace = False
        self.pace: dict[str, Any] | None = None
        self.waits: list[tuple[Any, Any]] | None = None

    @property
    def step(self) -> int | None:
        """The step that runs, counted from 0; ``None`` in a loop of the user's own."""
        return self._step

    @step.setter
    def step(self, value: int | None) -> None:
        self._step = value
        if self.mark is not None:
            self.mark[0] = 0 if value is None else value + 1

    @property
    def num_steps(self) -> int:
        """Optimizer steps that this process has done, as far as they were counted."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        if self.mark is not None:
            self.mark[1] = value

    def fail(self, error: BaseException) -> None:
        """Take note of an exception after which this rank takes part in nothing any more."""
        self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if self.on_failure is not None:
            self.on_failure(error)


now = Activity()
"""Those of this process."""


def name_of_bucket(names: Sequence[str]) -> str:
    """Return a short name for the parameters of a bucket, such as ``layers.7.mlp.*``."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    if common and (len(common) > 1 or all(part == common for part in parts)):
        return ".".join((*common, "*"))
    return f"{names[0]} ... {names[-1]}"
