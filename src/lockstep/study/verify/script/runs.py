"""The runs of a script under the launcher, each with a recorder in every rank."""

import json
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.errors import JobHangs, RankFailed
from lockstep.launcher.api import environment_restored, threads_for
from lockstep.launcher.bootstrap import RANK_SETUP
from lockstep.launcher.command import run
from lockstep.study.verify.script.trace import ScriptTrace
from lockstep.train.plan import plural

_RECORDER = "lockstep.study.verify.script.recorder:ScriptRecorder"

# A longer wait of a rank for another is a hang.
_WATCHDOG_S = 30


class Runs:
    """Runs a script as it is, or with features turned off."""

    def __init__(self, command: Sequence[str], devices: int, steps: int, report: Callable[[str], None]) -> None:
        self._command, self._devices, self._steps, self._report = command, devices, steps, report
        self._num_runs = 0

    def run(self, num_ranks: int, *off: str) -> tuple[list[ScriptTrace], str]:
        """Return the trace of each rank, and what the script ended with if it has failed."""
        self._num_runs += 1
        what = f", {' and '.join(off)} turned off" if off else ""
        self._report(f"run {self._num_runs} of at most 5: {plural(num_ranks, 'rank')}{what}")
        with TemporaryDirectory(prefix="lockstep-verify-") as folder, environment_restored():
            os.environ[RANK_SETUP] = json.dumps([[_RECORDER, folder, self._steps, list(off)]])
            os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(num_ranks)))
            flags = {"devices": num_ranks, "watchdog": _WATCHDOG_S, "redirects": 3, "log-dir": f"{folder}/logs"}
            job = [*(word for name, value in flags.items() for word in (f"--{name}", str(value))), *self._command]
            failure = ""
            try:
                run(job)
            except (JobHangs, RankFailed) as error:
                failure = str(error)
            return [_read(Path(folder) / str(rank)) for rank in range(num_ranks)], failure


def _read(path: Path) -> ScriptTrace:
    """Return the trace of a rank; an empty one if it was killed."""
    if not path.exists():
        return ScriptTrace({}, {}, ())
    trace: ScriptTrace = pickle.loads(path.read_bytes())
    return trace
