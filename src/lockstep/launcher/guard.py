"""The launcher's side of the guardian: starts it, and gives it orders."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from lockstep.launcher import guardian

_FAREWELL_S = 10.0
_SOCKET_PATH_LIMIT = 90
"""Below what all systems allow for the path of a socket (104 on macOS), with room for its name."""


class Guard:
    """A folder for one run and a guardian that clears away its ranks and the folder, however this process ends.

    A context manager: after an error inside, the ranks are killed; otherwise they are taken to have left.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.run_dir = Path(
            tempfile.mkdtemp(prefix="lockstep-", dir=base if len(base) < _SOCKET_PATH_LIMIT else "/tmp")
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
            # Bound here, so that ranks may sign in before the guardian has started.
            door.bind(str(self.run_dir / "guard"))
            orders_out, self._orders = os.pipe()
            try:
                handles = [str(self.run_dir), str(os.getpid()), str(orders_out), str(door.fileno())]
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", guardian.__file__, *handles],
                    pass_fds=[orders_out, door.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                os.close(self._orders)
                shutil.rmtree(self.run_dir, ignore_errors=True)
                raise
            finally:
                os.close(orders_out)

    def kill_ranks(self) -> None:
        """End all ranks and their children at once."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, guardian.KILL)

    def ended_at_ns(self, pids: set[int], *, timeout_s: float = 1.0) -> dict[int, int]:
        """Return when processes ended, as far as known; waits up to ``timeout_s`` for all to be known."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended: dict[int, int] = {}
            with contextlib.suppress(FileNotFoundError):
                for line in (self.run_dir / "ended").read_text().splitlines():
                    pid, time_ns = line.split()
                    ended[int(pid)] = int(time_ns)
            if pids <= ended.keys() or time.monotonic() >= deadline:
                return ended
            time.sleep(0.01)

    def close(self, *, kill: bool) -> None:
        """Have the guardian clear up and leave."""
        if not kill:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._orders, guardian.RELEASE)
        os.close(self._orders)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_S)
        # In case that the guardian itself was killed.
        guardian.remove_folders(str(self.run_dir))

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=error is not None)
