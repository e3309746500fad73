"""A small process beside the launcher that outlives it and clears away ranks and files, however the launcher ends."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

# A small process beside the launcher that outlives it: clears away ranks and files, however the launcher ends.
#
# Started by path with the standard library only, as ``guardian.py RUN_DIR LAUNCHER_PID PIPE_FD SOCKET_FD``. Ranks sign
# in on the socket. The pipe carries the launcher's orders; its end means that the launcher is gone.

KILL = b"k"
"""Order: end the ranks now, and stay."""
RELEASE = b"r"
"""Order: the job is over and its ranks have left; whatever they started on purpose may stay."""

_SWEEPS = 5


class ReaperProcess:
    """Watches the ranks of one run; each leads a session that holds it and its children."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.released = False
        self.is_killing = False
        self._started_at: dict[int, str | None] = {}

    def enlist(self, pid: int) -> int | None:
        """Note a rank; returns a descriptor that becomes readable when it ends, where the system has such."""
        self._started_at[pid] = start_time(pid)
        if self.is_killing:
            kill_session(pid)
        return pidfd(pid)

    def note_end(self, pid: int) -> None:
        """Write down when a rank ended, for the launcher to know which was first."""
        # A full disk is no reason to end here, and so to kill the ranks.
        with contextlib.suppress(OSError), open(os.path.join(self.run_dir, "ended"), "a") as file:
            file.write(f"{pid} {time.time_ns()}\n")

    def kill_all(self) -> None:
        """End every rank and whatever shares its session; also those that are still to come."""
        self.is_killing = True
        for pid, started_at in self._started_at.items():
            # A different start time: the number belongs to another process by now.
            if start_time(pid) in (started_at, None):
                kill_session(pid)


def remove_folder(run_dir: str) -> None:
    """Remove the folder of a run."""
    shutil.rmtree(run_dir, ignore_errors=True)


def kill_session(leader: int) -> None:
    """Kill a session's leader and its members, also when the leader is dead already."""
    for _ in range(_SWEEPS):  # A member may fork while we look.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        members = session_members(leader)
        if not members:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def session_members(leader: int) -> list[int]:
    """Return the living processes of a session (Linux; none elsewhere)."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        fields = stat_fields(int(name)) if name.isdigit() else None
        if fields and fields[3] == str(leader) and fields[0] != "Z":
            found.append(int(name))
    return found


def start_time(pid: int) -> str | None:
    """Return when a process started, in the system's own terms, or ``None`` if it is gone or unknown."""
    fields = stat_fields(pid)
    return fields[19] if fields else None


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name before them may hold spaces and parentheses itself.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def pidfd(pid: int) -> int | None:
    """Return a descriptor of a process, where the system has such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def watch(guardian: ReaperProcess, launcher_pid: int, orders_fd: int, door: socket.socket) -> None:
    """Serve until the launcher is gone or has released the ranks."""
    poller = select.poll()
    poller.register(orders_fd, select.POLLIN)
    poller.register(door, select.POLLIN)
    launcher_fd = pidfd(launcher_pid)
    if launcher_fd is not None:
        # The pipe may have been inherited by another child of the launcher and then stays open.
        poller.register(launcher_fd, select.POLLIN)
    running: dict[int, int] = {}
    while True:
        # Orders first: a launcher that released its ranks may be gone already.
        for fd, _ in sorted(poller.poll(), key=lambda ready: ready[0] != orders_fd):
            if fd == door.fileno():
                pid = int(door.recv(64))
                rank_fd = guardian.enlist(pid)
                if rank_fd is not None:
                    running[rank_fd] = pid
                    poller.register(rank_fd, select.POLLIN)
            elif fd in running:
                guardian.note_end(running.pop(fd))
                poller.unregister(fd)
                os.close(fd)
            elif fd == launcher_fd:
                return
            else:
                order = os.read(orders_fd, 1)
                if order == KILL:
                    guardian.kill_all()
                else:
                    guardian.released = order == RELEASE
                    return


def main(argv: list[str]) -> None:
    """Watch over one run, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    guardian = ReaperProcess(argv[1])
    door = socket.socket(fileno=int(argv[4]))
    try:
        watch(guardian, int(argv[2]), int(argv[3]), door)
    finally:
        if not guardian.released:
            guardian.kill_all()
            door.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:  # Ranks that signed in while the launcher ended.
                    guardian.enlist(int(door.recv(64)))
        remove_folder(guardian.run_dir)


if __name__ == "__main__":
    main(sys.argv)


# The launcher's side of the guardian: starts it, and gives it orders.

_FAREWELL_S = 10.0
_SOCKET_PATH_LIMIT = 90
"""Below what all systems allow for the path of a socket (104 on macOS), with room for its name."""


class Reaper:
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
                    [sys.executable, "-I", "-S", __file__, *handles],
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
            os.write(self._orders, KILL)

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
                os.write(self._orders, RELEASE)
        os.close(self._orders)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_S)
        # In case that the guardian itself was killed.
        remove_folder(str(self.run_dir))

    def __enter__(self) -> Reaper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=error is not None)
