"""A worker of the pool as the test session sees it: the process, the pipe to it, and what it writes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

from tests.pool_messages import READY

REPO = Path(__file__).parents[1]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Without it Gloo connects through whatever address the host's name has, if it has one."""


class PoolError(AssertionError):
    """A rank did not answer; names the ranks and carries what they wrote."""


class Worker:
    """One process, started at once and ready some seconds later."""

    def __init__(self, folder: Path, *, simulated: bool = False) -> None:
        self.connection, theirs = Pipe()
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self.log_start = 0
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.pool_worker", str(theirs.fileno()), str(os.getpid())]
                + ["simulated"] * simulated,
                cwd=REPO,
                env={**os.environ, "OMP_NUM_THREADS": "1", **LOOPBACK},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches only the session, and a kill reaches the worker's children too.
                start_new_session=True,
            )
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def await_start(self, deadline: float) -> None:
        """Wait until the worker has imported what it needs.

        Raises:
            PoolError: It did not get that far before ``deadline``.
        """
        started = False
        with contextlib.suppress(EOFError, ConnectionError):
            started = self.connection.poll(max(0.0, deadline - time.monotonic())) and self.connection.recv() == READY
        if not started:
            raise PoolError(f"a worker of the pool did not start\n{self.log()}")

    def mark_log(self) -> None:
        """Forget what was written so far."""
        self.log_start = self.log_path.stat().st_size

    def log(self) -> str:
        """Return what was written since the mark."""
        return self.log_path.read_bytes()[self.log_start :].decode(errors="replace").strip()

    def dump_stacks(self) -> None:
        """Have the worker write the stack of each of its threads to its log."""
        if self.is_alive:
            self.process.send_signal(signal.SIGQUIT)

    def kill(self) -> None:
        """End the process and its children, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
