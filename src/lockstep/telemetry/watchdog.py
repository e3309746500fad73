"""A thread in the launcher that reads the ranks' beacons: reports a job that hangs, and ends a rank that has failed."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.comm.bulletin import Bulletin
from lockstep.telemetry.failed_ranks import FailedRanks
from lockstep.telemetry.life import HAS_PROC, Life, sample, state_of
from lockstep.telemetry.pace import PaceKeeper
from lockstep.telemetry.report import report
from lockstep.telemetry.resources import DeviceMemory, Resources
from lockstep.telemetry.seen import RankSeen, operation, waits_outside
from lockstep.telemetry.stacks import busy_workers, keep_stacks
from lockstep.telemetry.verdict import Verdict, judge

_SETTLED_S = 1.0
"""A rank that has been at one place for so long is looked at more closely."""
_NUM_REPORTS = 5
_TOPIC = "ranks"
_STALE_S = 10.0


class Watchdog:
    """Watches the ranks of this machine within a ``with``; does nothing if ``patience_s`` is zero.

    Args:
        run_dir: Where the beacons are.
        patience_s: How long ranks may wait for each other.
        is_strict: See `lockstep.telemetry.verdict.judge`.
        num_nodes: Machines in the job.
        bulletin: Where the launchers of several machines tell each other what they see.
        resources: Takes note of memory while the ranks run.
        on_report: Called from a thread of its own with each report, the verdict, and the processes by rank of those on
            this machine that keep the others waiting; tells whether to go on watching.
        on_slow: Called with a sentence about a rank that keeps the others waiting a little in every step.
    """

    def __init__(
        self,
        run_dir: Path,
        patience_s: float,
        *,
        is_strict: bool,
        num_nodes: int,
        bulletin: Bulletin | None,
        resources: Resources,
        on_report: Callable[[str, Verdict, dict[int, int]], bool],
        on_slow: Callable[[str], None],
    ) -> None:
        self._run_dir, self._patience_s, self._is_strict = run_dir, patience_s, is_strict
        self._num_nodes, self._bulletin = num_nodes, bulletin
        self._resources, self._on_report = resources, on_report
        self._pace = PaceKeeper(on_slow)
        self._over = threading.Event()
        self._lives: dict[int, Life] = {}
        self._failed = FailedRanks(run_dir, num_nodes)
        self._told, self._num_reports, self._num_posts = Verdict.FINE, 0, 0
        self._elsewhere: dict[int, tuple[int, float]] = {}
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
        while not self._failed.rest(self._over):
            seen, pids = self._look()
            if not seen:
                continue
            self._resources.look(pids)
            self._failed.end(seen, pids)
            everywhere, num_seen = self._merged(seen)
            verdict = judge(
                everywhere, self._patience_s, is_strict=self._is_strict, sees_all=num_seen >= self._num_nodes
            )
            if verdict is Verdict.FINE:
                self._told = verdict
            elif verdict > self._told and (verdict is Verdict.HANGS or self._num_reports < _NUM_REPORTS):
                self._told, self._num_reports = verdict, self._num_reports + 1
                if not self._tell(everywhere, pids, verdict, num_seen):
                    return

    def _tell(self, seen: list[RankSeen], pids: dict[int, int], verdict: Verdict, num_seen: int) -> bool:
        folder = keep_stacks(self._run_dir, pids)
        if self._over.is_set():  # The job has ended meanwhile.
            shutil.rmtree(folder, ignore_errors=True)
            return False
        awaited = {each.rank for each in seen if operation(each) is None} or {each.rank for each in seen}
        nodes = {"num_nodes": self._num_nodes, "num_seen": num_seen}
        workers = busy_workers(folder, sorted(awaited & set(pids)))
        text = report(seen, self._patience_s, folder, verdict, workers=workers, **nodes)
        return self._on_report(text, verdict, {rank: pid for rank, pid in pids.items() if rank in awaited})

    def _look(self) -> tuple[list[RankSeen], dict[int, int]]:
        """Return what is seen of each rank of this machine, and the process of each that lives."""
        found, pids = [], {}
        for path in self._run_dir.glob("beacon-*"):
            try:
                said = json.loads(path.read_bytes())
            except ValueError:  # It is being written.
                return [], {}
            rank, pid = int(path.name.partition("-")[2]), said["pid"]
            state, _ = state_of(pid)
            if state in ("", "Z", "X"):
                found.append(RankSeen(rank, has_left=True))
                continue
            pids[rank] = pid
            self._resources.devices[rank] = [DeviceMemory(*each) for each in said["devices"]]
            found.append(self._seen(rank, said, is_stopped=state in ("T", "t")))
            self._pace.take(rank, said["pace"])
        self._pace.judge(len(pids))
        return found, pids

    def _seen(self, rank: int, said: dict[str, Any], *, is_stopped: bool) -> RankSeen:
        now_s = time.monotonic()
        still_s, silent_s = now_s - said["moved_ns"] / 1e9, now_s - said["beat_ns"] / 1e9
        life = self._lives.setdefault(rank, Life(self._patience_s))
        if max(still_s, silent_s) < _SETTLED_S:
            life.clear()
        elif HAS_PROC:
            life.add(sample(said["pid"], own_bytes=said["num_bytes"]))
        signs = life.signs()
        if outside := waits_outside(said["frames"]):
            signs = signs or f"it waits for {outside}"
        return RankSeen(
            rank,
            said["frames"],
            still_s=still_s,
            silent_s=silent_s,
            is_busy=life.is_busy or not HAS_PROC,
            life=signs,
            is_stopped=is_stopped,
            step=said["step"],
            phase=said["phase"],
            num_steps=said["num_steps"],
            has_trained=said["num_calls"] > 0 or said["num_steps"] > 0,
            bucket=said["bucket"],
            collective=said["collective"],
            handles=said["handles"],
            failure=said["failure"] or "",
            held_up=said["held_up"] or "",
            uses_gpu=said["uses_gpu"],
        )

    def _merged(self, seen: list[RankSeen]) -> tuple[list[RankSeen], int]:
        """Return what is seen of the ranks of all machines, and of how many that is."""
        if self._bulletin is None or all(each.idle_s < self._patience_s / 2 for each in seen):
            return seen, 1
        self._num_posts += 1
        self._bulletin.post(_TOPIC, {"count": self._num_posts, "ranks": [asdict(_bare(each)) for each in seen]})
        everywhere, num_seen, now_s = list(seen), 1, time.monotonic()
        for note in self._bulletin.others(_TOPIC):
            first = note["ranks"][0]["rank"]
            count, since_s = self._elsewhere.get(first, (-1, 0.0))
            if note["count"] != count:
                self._elsewhere[first] = note["count"], now_s
            elif now_s - since_s > _STALE_S:  # Its ranks move, or it is gone.
                continue
            num_seen += 1
            everywhere += [RankSeen(**each) for each in note["ranks"]]
        return everywhere, num_seen


def _bare(seen: RankSeen) -> RankSeen:
    """Return ``seen`` with the few frames that matter elsewhere, where the files may not be the same."""
    return replace(seen, frames=list(seen.frames)[:20])
