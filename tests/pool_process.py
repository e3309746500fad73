"""A worker of the pool as the test session sees it: the process, the pipe to it, and what it writes.

Workers are forked off processes that have imported torch, which all sessions of a run share (`Templates`): an
interpreter that imports torch and makes its first optimizer has spent four seconds of a core. There are two of these,
each with hashes of its own, so that an order that depends on a set differs between neighbouring ranks, as for users.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path

from tests.pool_messages import READY

REPO = Path(__file__).parents[1]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Without it Gloo connects through whatever address the host's name has, if it has one."""
END_TIMEOUT_S = 10.0


class PoolError(AssertionError):
    """A rank did not answer; names the ranks and carries what they wrote."""


class Templates:
    """The two processes that workers are forked off; they end with the process that made this."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
        self.paths = [str(Path(self._folder.name) / name) for name in ("even", "odd")]
        self._processes = []
        for path in self.paths:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen(64)
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", "tests.pool_worker", str(listener.fileno()), str(os.getpid())],
                        cwd=REPO,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        pass_fds=[listener.fileno()],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C reaches only the session
                    )
                )

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


class Worker:
    """One process, forked off the one at ``path``; ready after a moment, or when that has imported torch."""

    def __init__(self, path: str, folder: Path, *, simulated: bool = False) -> None:
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self.log_start = 0
        self.pid: int | None = None
        self.exit_status: int | None = None
        self.connection, theirs = Pipe()
        self._template = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._template.connect(path)
        request = {"environ": {**os.environ, "OMP_NUM_THREADS": "1", **LOOPBACK}, "simulated": simulated}
        with theirs, self.log_path.open("wb") as log:
            socket.send_fds(self._template, [json.dumps(request).encode()], [log.fileno(), theirs.fileno()])

    @property
    def is_alive(self) -> bool:
        return self._wait(0) is None

    def _wait(self, timeout_s: float) -> int | None:
        """Return its exit status as `subprocess` has it, or nothing if it still runs then."""
        if self.exit_status is None:
            self._template.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self.exit_status = int(self._template.recv(64) or -signal.SIGKILL)
                self._template.close()
        return self.exit_status

    def wait(self) -> int | None:
        """Wait for its end and return its exit status."""
        return self._wait(END_TIMEOUT_S)

    def await_start(self, deadline: float) -> None:
        """Wait until the worker can be called.

        Raises:
            PoolError: It did not get that far before ``deadline``.
        """
        started = False
        self._template.settimeout(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError, EOFError, ValueError):
            self.pid = int(self._template.recv(64))
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
        if self.is_alive and self.pid is not None:
            os.kill(self.pid, signal.SIGQUIT)

    def kill(self) -> None:
        """End the process and its children, and wait for its end."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # its children too, also if it has ended
            self.wait()
        self._template.close()
        self.connection.close()
