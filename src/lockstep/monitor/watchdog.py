"""A thread in the launcher that reads the ranks' beacons, and reports a job that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from lockstep.monitor.beacon import STACKS_SIGNAL_OFFSET
from lockstep.monitor.verdict import RankSeen, is_hanging, report

_PERIOD_S = 0.5
_STACKS_S = 1.0
_BUSY = 0.2
"""The share of a core above which a rank is taken to compute."""


class Watchdog:
    """Watches the ranks of this machine within a ``with``; does nothing if ``patience_s`` is zero.

    Args:
        run_dir: Where the beacons are.
        patience_s: How long ranks may wait for each other.
        num_nodes: Machines in the job; of the others' ranks nothing is seen here.
        on_hang: Called once with the report, from a thread of its own.
    """

    def __init__(self, run_dir: Path, patience_s: float, *, num_nodes: int, on_hang: Callable[[str], None]) -> None:
        self._run_dir, self._patience_s, self._num_nodes, self._on_hang = run_dir, patience_s, num_nodes, on_hang
        self._over = threading.Event()
        self._cpu: dict[int, list[tuple[float, float]]] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._patience_s > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_PERIOD_S):
            seen, pids = self._look()
            if is_hanging(seen, self._patience_s):
                folder = self._keep_stacks(pids)
                if self._over.is_set():  # The job has ended meanwhile.
                    shutil.rmtree(folder, ignore_errors=True)
                else:
                    self._on_hang(report(seen, self._patience_s, folder, num_nodes=self._num_nodes))
                return

    def _look(self) -> tuple[list[RankSeen], dict[int, int]]:
        """Return what is seen of each rank, and the process of each that lives."""
        found, pids = [], {}
        now_s = time.monotonic()
        for path in self._run_dir.glob("beacon-*"):
            try:
                said = json.loads(path.read_bytes())
            except ValueError:  # It is being written.
                return [], {}
            rank, pid = int(path.name.partition("-")[2]), said["pid"]
            state, cpu_s = _process(pid)
            if state in ("", "Z", "X"):
                found.append(RankSeen(rank, has_left=True))
                continue
            pids[rank] = pid
            found.append(
                RankSeen(
                    rank,
                    [(file, line, function) for file, line, function in said["frames"]],
                    still_s=now_s - said["moved_ns"] / 1e9,
                    silent_s=now_s - said["beat_ns"] / 1e9,
                    is_busy=self._is_busy(pid, now_s, cpu_s),
                    is_stopped=state in ("T", "t"),
                )
            )
        return found, pids

    def _is_busy(self, pid: int, now_s: float, cpu_s: float) -> bool:
        history = self._cpu.setdefault(pid, [])
        history.append((now_s, cpu_s))
        while now_s - history[0][0] > self._patience_s:
            history.pop(0)
        since_s, before_s = history[0]
        return cpu_s - before_s > _BUSY * (now_s - since_s)

    def _keep_stacks(self, pids: dict[int, int]) -> str:
        """Have all ranks write their stacks, and keep them in a folder that outlives the run."""
        folder = Path(tempfile.mkdtemp(prefix="lockstep-hang-"))
        if hasattr(signal, "SIGRTMIN"):
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGRTMIN + STACKS_SIGNAL_OFFSET)
            self._over.wait(_STACKS_S)
        for rank in pids:
            target = folder / f"rank-{rank}.txt"
            with contextlib.suppress(OSError):
                shutil.copyfile(self._run_dir / f"stacks-{rank}", target)
                if not target.stat().st_size:  # stopped, or not Linux: what its beacon said last
                    frames = json.loads((self._run_dir / f"beacon-{rank}").read_bytes())["frames"]
                    lines = [f'  File "{file}", line {line} in {function}\n' for file, line, function in frames]
                    target.write_text("Last seen (most recent call first):\n" + "".join(lines))
        return str(folder)


def _process(pid: int) -> tuple[str, float]:
    """Return the state of a process, and its seconds of processor time; an empty state if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return "", 0.0
        return "R", time.monotonic()  # not Linux: taken to compute, which only makes the watchdog more patient
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
