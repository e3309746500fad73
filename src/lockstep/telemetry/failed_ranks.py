"""Ranks that have failed but whose processes go on: they are ended if others wait, so that these learn of it now.

A rank counts as failed once its exception has left ``with lockstep.init()`` or the program, and once nobody will catch
it any more while a ``finally`` holds it up. The latter is only ended if it does nothing there: it may be saving what it
has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.telemetry.life import HAS_PROC, Life, sample
from lockstep.telemetry.seen import RankSeen, is_debugged, operation, waits_outside

_PERIOD_S = 0.5
_GLANCE_S = 0.1
_FAILED_S = 0.4
"""How long others may wait for a rank that has failed and does not end."""
_FRESH_S = 0.3
"""A rank writes that it has failed into one file, and a moment later into its beacon."""


@dataclass(frozen=True)
class _Held:
    since_s: float
    life: Life


class FailedRanks:
    """What the watchdog knows of them.

    Args:
        run_dir: Where ranks leave their exceptions.
        num_nodes: Machines in the job.
    """

    def __init__(self, run_dir: Path, num_nodes: int) -> None:
        self._run_dir, self._num_nodes = run_dir, num_nodes
        self._held: dict[int, _Held] = {}

    def rest(self, over: threading.Event) -> bool:
        """Wait until it is time to look at the ranks, soon if one has failed; return whether it is ``over``."""
        now_s = time.monotonic()
        dues = [held.since_s + _FAILED_S for held in self._held.values()]
        deadline = min([now_s + _PERIOD_S, *(due for due in dues if due > now_s)])
        while not over.wait(min(_GLANCE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._has_just_failed():
                return False
        return True

    def end(self, seen: Sequence[RankSeen], pids: Mapping[int, int]) -> None:
        """Kill those for which others have waited for long enough."""
        now_s = time.monotonic()
        for each in seen:
            pid = pids.get(each.rank)
            if pid is None or not (each.failure or each.held_up):
                self._held.pop(each.rank, None)
                continue
            held = self._held.get(each.rank)
            if held is None:
                self._held[each.rank] = _begin(now_s, pid)
            elif now_s - held.since_s >= _FAILED_S and self._is_awaited(each, seen):
                if not each.failure and not _does_nothing(each, held.life, pid):
                    self._held[each.rank] = _begin(now_s, pid)
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _is_awaited(self, failed: RankSeen, seen: Sequence[RankSeen]) -> bool:
        """Tell whether another rank waits that has not failed itself; of several machines it may be elsewhere."""
        return self._num_nodes > 1 or any(
            operation(each) is not None
            for each in seen
            if not each.held_up and (failed.failure or each.rank != failed.rank)
        )

    def _has_just_failed(self) -> bool:
        for path in self._run_dir.glob("failure-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < _FRESH_S:
                    return True
        return False


def _begin(now_s: float, pid: int) -> _Held:
    life = Life(window_s=3600.0)
    life.add(sample(pid, own_bytes=0))
    return _Held(now_s, life)


def _does_nothing(seen: RankSeen, life: Life, pid: int) -> bool:
    """Tell whether a rank neither computes nor reads or writes, nor waits for other ranks or for a person."""
    life.add(sample(pid, own_bytes=0))
    is_alive = not HAS_PROC or life.is_busy or life.signs() or waits_outside(seen.frames)
    return not is_alive and operation(seen) is None and not is_debugged(seen)
