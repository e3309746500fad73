"""The runs of a script under the launcher, each with a recorder in every rank, in a child of this process.

    verify              child of a run                      rank
    imports torch
    os.fork() --------> protects the files: sandbox.py
                        fork server, launcher ------------> script and recorder
    reads it <--------- outcome

Ranks are forked from a process that has imported torch, as in fork_server.py, and see the file system of the child.
"""

import ctypes
import json
import math
import os
import pickle
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from click import UsageError

from lockstep.base.activity import plural
from lockstep.errors import ConfigurationError, JobHangs, LockstepError, RankFailed, Stopped
from lockstep.launcher import fork_server
from lockstep.launcher.api import threads_for
from lockstep.launcher.bootstrap import RANK_SETUP
from lockstep.launcher.command import run
from lockstep.study.verify.script import sandbox
from lockstep.study.verify.script.trace import ScriptTrace

_RECORDER = "lockstep.study.verify.script.recorder"

# What ranks need, for one import before all runs.
MODULES = (
    *("torch", "torch.distributed", fork_server.OPTIMIZER, "lockstep.comm.world", "lockstep.parallel.ddp.wrapper"),
    _RECORDER,
)

# A longer wait of a rank for another is a hang.
_WATCHDOG_S = 30
# For the child to end its ranks.
_EXIT_S = 20.0
_PR_SET_PDEATHSIG = 1


def count_devices() -> int:
    """Return the number of devices, from a child: a process that has used devices cannot be forked."""
    if (pid := os.fork()) == 0:
        num_devices = 0
        try:
            num_devices = torch.accelerator.device_count()
        finally:
            os._exit(num_devices)
    return fork_server.ForkedProcess(pid).wait()


class Runs:
    """Runs a script as it is, or with features turned off.

    Args:
        command: The script and its arguments.
        steps: Updates of each epoch that are recorded.
        report: Called with a text about progress.
        minutes: For all runs together; None for no limit.
        allow_writes: Whether the runs may change files.

    Attributes:
        cuts: Whether passes over loaders are cut short.
    """

    def __init__(
        self,
        command: Sequence[str],
        steps: int,
        report: Callable[[str], None],
        *,
        minutes: float | None = None,
        allow_writes: bool = False,
    ) -> None:
        self._command, self._steps, self._report = command, steps, report
        self._minutes, self._allow_writes = minutes, allow_writes
        self._end_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._num_runs, self._first_s, self.cuts = 0, 0.0, True

    def run(self, num_ranks: int, *off: str) -> tuple[list[ScriptTrace], str]:
        """Return the trace of each rank, and what the script ended with if it has failed, or that the time is over.

        Raises:
            ConfigurationError: The script cannot be run, or the time was over before two runs were done.
            Stopped: A signal arrived, and the ranks have ended.
        """
        self._num_runs += 1
        what = plural(num_ranks, "rank") + (f", {' and '.join(off)} turned off" if off else "")
        took = f" (the first took {self._first_s:.0f} s)" if self._first_s else ""
        self._report(f"run {self._num_runs} of at most {5 if self.cuts else 6}: {what}{took}")
        began_s = time.monotonic()
        if began_s > self._end_s:
            return [], self._out_of_time(what)
        # Ranks leave through the stack of the child with SystemExit, so nothing here is to be undone by them.
        scratch = Path(tempfile.mkdtemp(prefix="lockstep-verify-")).resolve()
        outcome = os.open(scratch / "outcome", os.O_RDWR | os.O_CREAT, 0o600)
        parent = os.getpid()
        with warnings.catch_warnings(action="ignore"):  # about threads: the child starts only new interpreters then
            pid = os.fork()
        if pid == 0:
            self._be_child(parent, scratch, outcome, num_ranks, off)
        child = fork_server.ForkedProcess(pid)
        try:
            with fork_server.signal_handlers((signal.SIGTERM, signal.SIGHUP), _stop):
                code = child.wait(self._end_s - began_s)
            with open(outcome, "rb", closefd=False) as file:
                file.seek(0)
                written = file.read()
        except subprocess.TimeoutExpired:
            return [], self._out_of_time(what)
        finally:
            try:
                _end(child)
            finally:
                os.close(outcome)
                sandbox.remove(scratch)
        if not written:
            raise LockstepError(f"The process of run {self._num_runs} ({what}) has ended with exit status {code}.")
        self._first_s = self._first_s or time.monotonic() - began_s
        traces, failure, error = pickle.loads(written)
        if error is not None:
            raise error
        return [pickle.loads(trace) if trace else ScriptTrace({}, {}, ()) for trace in traces], failure

    def _out_of_time(self, what: str) -> str:
        stopped = f"Stopped after {self._minutes:g} minutes (--minutes)"
        if self._num_runs > (2 if self.cuts else 3):
            return f"{stopped}: run {self._num_runs} ({what}) is missing."
        raise ConfigurationError(
            f"{stopped}, before run {self._num_runs} ({what}) was done, and verify compares two.\nGive more minutes."
        )

    def _be_child(self, parent: int, scratch: Path, outcome: int, num_ranks: int, off: Sequence[str]) -> NoReturn:
        """Run the script in this process, write the outcome, and exit."""
        own, code = os.getpid(), 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:  # else it has ended before the line above
                written = pickle.dumps(self._outcome(scratch, num_ranks, off))
                with open(outcome, "wb", closefd=False) as file:
                    file.write(written)
                code = 0
        except BaseException as error:
            if os.getpid() != own:
                raise  # a forked rank, which ends like any interpreter
            if not isinstance(error, KeyboardInterrupt | Stopped):
                traceback.print_exc()
        os._exit(code)

    def _outcome(
        self, scratch: Path, num_ranks: int, off: Sequence[str]
    ) -> tuple[list[bytes], str, ConfigurationError | UsageError | None]:
        """Return the traces, empty of ranks that were killed, what the script failed with, or why it cannot be run."""
        failure = ""
        try:
            writes_fail = not self._allow_writes and sandbox.protect(scratch)
            folder = scratch / "run"
            folder.mkdir()
            os.environ.setdefault("WANDB_MODE", "offline")  # this is no experiment
            # Forked ranks apply their number of threads because the server has none.
            threads = os.environ.pop("OMP_NUM_THREADS", str(threads_for(num_ranks)))
            fork_server.start()
            os.environ["OMP_NUM_THREADS"] = threads
            recorder = [f"{_RECORDER}:ScriptRecorder", str(folder), self._steps, list(off), self.cuts]
            os.environ[RANK_SETUP] = json.dumps([recorder])
            flags = {"devices": num_ranks, "watchdog": _WATCHDOG_S, "redirects": 3, "log-dir": f"{folder}/logs"}
            run([*(word for name, value in flags.items() for word in (f"--{name}", str(value))), *self._command])
        except (JobHangs, RankFailed) as error:
            failure = sandbox.explain(str(error), writes_fail)
        except (ConfigurationError, UsageError) as error:
            return [], "", error
        files = [folder / str(rank) for rank in range(num_ranks)]
        return [file.read_bytes() if file.exists() else b"" for file in files], failure, None


def _stop(number: int, _frame: object) -> NoReturn:
    raise Stopped(f"Stopped by {signal.Signals(number).name}; all ranks have ended.", signal=number)


def _end(child: fork_server.ForkedProcess) -> None:
    """End a run, unless it has ended; blocks until its ranks have."""
    if child.poll() is None:
        os.kill(child.pid, signal.SIGTERM)
        try:
            child.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)  # its ranks end with it
            child.wait(_EXIT_S)
