"""The run as a file: a line of JSON for each step and each evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.data.loader import BadSample
from lockstep.errors import ConfigurationError
from lockstep.telemetry.stragglers import Straggler
from lockstep.train.nonfinite import NonFiniteStep

_WRITE_S = 5.0


class Log:
    """Appends to a file; a run that starts anew begins it anew.

    Args:
        path: The file; its folder must be there.
        first_step: Steps done before, in a run that is resumed.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        try:
            self._file = path.open("a" if first_step else "w", buffering=1)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot write the log file {path}: {error.strerror}.\nName another one."
            ) from error
        self._num_written = 0
        self._first_step = first_step
        self._written_at = time.perf_counter()

    def is_due(self) -> bool:
        """Return whether losses have waited long enough to be written."""
        return time.perf_counter() - self._written_at >= _WRITE_S

    def losses(self, losses: Sequence[float]) -> None:
        """Write those of the losses of this run that are not written yet."""
        for loss in losses[self._num_written :]:
            self._num_written += 1
            self._line({"step": self._first_step + self._num_written, "loss": loss})
        self._written_at = time.perf_counter()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write what an evaluation after ``step`` steps found."""
        self._line({"step": step, "evaluation": dict(metrics)})

    def skipped(self, bad: BadSample, *, evaluation: bool = False) -> None:
        """Write that a sample was left out, as it could not be read."""
        place = {"evaluation": True} if evaluation else {"epoch": bad.epoch + 1}
        self._line({"step": bad.step + 1, "skipped": bad.sample, **place, "cause": bad.cause})

    def not_finite(self, bad: NonFiniteStep) -> None:
        """Write that a step's gradient was not finite, where that came from, and what was done."""
        where = {"ranks": list(bad.ranks), "parameter": bad.first, "samples": bad.samples}
        self._line({"step": bad.step + 1, "not_finite": bad.done, **where})

    def slow(self, step: int, straggler: Straggler) -> None:
        """Write that a rank keeps the others waiting in each step, and where it loses the time."""
        lost = {"lost_s": straggler.lost_s, "step_s": straggler.step_s}
        self._line({"step": step, "slow_rank": straggler.rank, "phase": straggler.phase, **lost})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, content: Mapping[str, object]) -> None:
        self._file.write(json.dumps(content) + "\n")
