"""Have ranks, and their DataLoader workers, write their Python stacks, and keep them for the user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.telemetry.beacon import STACKS_SIGNAL_OFFSET
from lockstep.telemetry.life import family
from lockstep.telemetry.seen import user_frame, where_of

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_AT_REST = ("selectors.py", "connection.py", "queues.py", "threading.py")
_RANK_S = 1.0
_WORKER_S = 0.3
_PAUSE_S = 0.02


def keep_stacks(run_dir: Path, pids: Mapping[int, int]) -> str:
    """Write a file for each rank into a folder that outlives the run; return the folder.

    Workers that a rank has forked write into its file, too, one after the other; each gets a file of its own.

    Args:
        run_dir: Where the ranks' beacons are.
        pids: The process of each rank that lives.
    """
    folder = Path(tempfile.mkdtemp(prefix="lockstep-hang-"))
    starts = {rank: _size(run_dir / f"stacks-{rank}") for rank in pids}
    for pid in pids.values():
        _ask(pid)
    deadline = time.monotonic() + _RANK_S
    while time.monotonic() < deadline and any(_size(run_dir / f"stacks-{rank}") == starts[rank] for rank in pids):
        time.sleep(_PAUSE_S)
    time.sleep(5 * _PAUSE_S)  # those that have begun write on
    for rank, pid in pids.items():
        text = _from(run_dir / f"stacks-{rank}", starts[rank])
        (folder / f"rank-{rank}.txt").write_text(text or _last_seen(run_dir, rank))
        for child in sorted(set(family(pid)) - {pid}):
            start = _size(run_dir / f"stacks-{rank}")
            if _ask(child):
                time.sleep(_WORKER_S)
                if text := _from(run_dir / f"stacks-{rank}", start):
                    (folder / f"rank-{rank}-process-{child}.txt").write_text(text)
    return str(folder)


def busy_workers(folder: str, ranks: Iterable[int]) -> list[str]:
    """Return a sentence for each DataLoader worker of ``ranks`` that is not just waiting for work.

    Args:
        folder: Where `keep_stacks` has left the stacks.
        ranks: Whose workers are looked at.
    """
    told = []
    for rank in ranks:
        for path in sorted(Path(folder).glob(f"rank-{rank}-process-*.txt")):
            frames = [(file, int(line), function) for file, line, function in _FRAME.findall(path.read_text())]
            is_worker = any(function == "_worker_loop" for _, _, function in frames)
            if is_worker and frames[0][0].endswith(_AT_REST):
                continue
            file, line, function = user_frame(frames)
            if is_worker:
                pid = path.stem.rpartition("-")[2]
                told.append(f"the loader process {pid} of rank {rank} is in {function} ({where_of(file, line)})")
    return told


def _ask(pid: int) -> bool:
    """Send the signal to a process that has a handler for it: any other would die of it."""
    if not hasattr(signal, "SIGRTMIN"):
        return False
    number = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (number - 1) & 1:
                os.kill(pid, number)
                return True
    return False


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _from(path: Path, start: int) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[start:].decode(errors="replace")
    return ""


def _last_seen(run_dir: Path, rank: int) -> str:
    """Return what a rank's beacon said last: it is stopped, or this is not Linux."""
    with contextlib.suppress(OSError, ValueError):
        frames = json.loads((run_dir / f"beacon-{rank}").read_bytes())["frames"]
        lines = [f'  File "{file}", line {line} in {function}\n' for file, line, function in frames]
        return "Last seen (most recent call first):\n" + "".join(lines)
    return "Nothing was seen of it.\n"
