"""A small process that outlives the launcher and removes ranks and files, however the launcher ends.

The launcher starts this file by path, as ``reaper.py RUN_DIR LAUNCHER_PID ORDERS_FD SOCKET_FD``, with the standard
library only. Ranks sign in on the socket. The pipe carries the launcher's orders; end of file means that the launcher
is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

# Orders: end the ranks now, and keep running; or: the job is over, and processes left behind on purpose may stay.
_KILL, _RELEASE = b"k", b"r"

_EXIT_S = 10.0
_NUM_SWEEPS = 5
# Longest path of the temporary folder: then sockets in the launcher's have paths below 104 bytes, allowed everywhere.
_LONGEST_FOLDER = 60


class Reaper:
    """The launcher's side: a folder for one run, and the process that removes its ranks and the folder.

    A context manager: after an error inside the block, the ranks are killed; otherwise it assumes that they have ended.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.run_dir = Path(tempfile.mkdtemp(prefix="lockstep-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp"))
        # Stays open as long as this process lives: see `end_with_launcher` in bootstrap.py.
        os.mkfifo(self.run_dir / "alive", 0o600)
        self._alive = os.open(self.run_dir / "alive", os.O_RDWR)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sign_in:
            # Bound here, so that ranks may sign in before the reaper has started.
            sign_in.bind(str(self.run_dir / "reaper"))
            orders, self._orders = os.pipe()
            arguments = [str(self.run_dir), str(os.getpid()), str(orders), str(sign_in.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *arguments],
                pass_fds=[orders, sign_in.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C and other signals to the launcher's group do not reach it
            )
            os.close(orders)

    def kill_ranks(self) -> None:
        """End all ranks and their children at once."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, _KILL)

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._orders, _RELEASE)
        os.close(self._orders)  # without an order it ends the ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        os.close(self._alive)
        shutil.rmtree(self.run_dir, ignore_errors=True)  # in case the reaper itself was killed


def kill_sessions(leaders: Iterable[int]) -> None:
    """Kill the leaders of sessions and their members, even if a leader is already dead."""
    names = set(map(str, leaders))
    for _ in range(_NUM_SWEEPS):  # a member may fork during the search
        members = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            fields = _stat_fields(int(name))
            if fields and fields[3] in names and fields[0] != "Z":
                members.append(int(name))
        if not members:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on."""
    # The name before them may contain spaces, parentheses, and bytes that are no text.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return None


def start_time(pid: int) -> str | None:
    """Return when a process started, in the system's format, or ``None`` if it is gone or unknown."""
    return fields[19] if (fields := _stat_fields(pid)) else None


def main(argv: list[str]) -> None:
    """Watch one run until the launcher is gone or has released the ranks, then clean up."""
    # Schedulers signal all processes of a job.
    ends = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
    for number in (*ends, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    run_dir, launcher_pid, orders, sign_in = argv[1], int(argv[2]), int(argv[3]), socket.socket(fileno=int(argv[4]))
    is_killing, order = False, b""
    # Each rank leads a session that contains it and its children. With its start time, a pid identifies it uniquely.
    start_times: dict[int, str | None] = {}
    alive: list[int] = []

    def take_in() -> None:
        """Register the rank whose message has arrived."""
        message, descriptors, _, _ = socket.recv_fds(sign_in, 64, 1)
        pid = int(message)
        start_times[pid] = start_time(pid)
        alive.extend(descriptors)
        if is_killing:  # it was being started when the order arrived
            kill_sessions([pid])

    def kill_all() -> None:
        """End every rank and all processes in its session, including ranks that sign in later."""
        nonlocal is_killing
        is_killing = True
        # A different start time: the pid now belongs to another process.
        kill_sessions([pid for pid, at in start_times.items() if start_time(pid) in (at, None)])

    descriptors = [orders, sign_in.fileno()]
    # Another child of the launcher may have inherited the pipe, which then stays open.
    with contextlib.suppress(OSError):  # the launcher may be gone already
        descriptors.append(os.pidfd_open(launcher_pid))
    try:
        while True:
            ready = select.select(descriptors, [], [])[0]
            # Orders first: a launcher that released its ranks may be gone already.
            if orders in ready:
                order = os.read(orders, 1)
                if order != _KILL:
                    break
                kill_all()
            elif sign_in.fileno() in ready:
                take_in()
            else:
                break
    finally:
        if order == _RELEASE:
            for descriptor in alive:  # processes that ranks left behind no longer end with the launcher
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        else:
            kill_all()
            while select.select([sign_in], [], [], 0)[0]:  # ranks that signed in while the launcher ended
                take_in()
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv)
