"""A thread in the launcher that reads the ranks' heartbeats and reports a job that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.comm.store import InterNodeStore
from lockstep.telemetry.heartbeat import STACKS_SIGNAL_OFFSET
from lockstep.telemetry.rank_state import (
    HAS_PROC,
    WAKES_UP,
    Liveness,
    RankState,
    is_debugged,
    operation,
    place,
    process_state,
    process_tree,
    sample,
    user_frame,
    waits_outside,
    where_of,
)
from lockstep.telemetry.resources import DeviceMemory, Resources
from lockstep.telemetry.stragglers import PaceKeeper

# Decide whether a job hangs: a pure function of what was seen of each rank. The rule: docs/design/watchdog.md.

GRACE = 5.0
"""A rank that may be only slow can keep the others waiting this many times longer than one that does nothing."""


_ONE_TO_ONE = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"}
"""Calls of different names that belong together."""


class Verdict(IntEnum):
    """What is to be done about the ranks."""

    FINE = 0
    SUSPECT = 1
    """To be told of, as it may resolve itself."""
    HANGS = 2
    """It will not resolve itself."""


def judge(ranks: Sequence[RankState], patience_s: float, *, is_strict: bool, sees_all: bool = True) -> Verdict:
    """Decide whether some ranks wait for others that will not come.

    Args:
        ranks: What is seen of each.
        patience_s: How long a rank may wait for another that does nothing.
        is_strict: Whether one that computes, or a transfer, may take ``GRACE`` times as long at most; else without end.
        sees_all: Whether ``ranks`` are all of the job.
    """
    if not ranks or any(is_debugged(seen) for seen in ranks):
        return Verdict.FINE
    waiting = [seen for seen in ranks if operation(seen) is not None]
    others = [seen for seen in ranks if operation(seen) is None]
    if not waiting:
        return _nobody_waits(ranks, patience_s, is_strict=is_strict)
    waits_s = min(seen.still_s for seen in waiting)
    if waits_s < patience_s:
        return Verdict.FINE
    is_long = waits_s >= GRACE * patience_s
    at_last = (Verdict.HANGS if is_strict else Verdict.SUSPECT) if is_long else Verdict.FINE
    if not others:
        calls = {_what(seen) for seen in waiting}
        # A transfer may simply be slow where all are in the same call, but then something of it is seen.
        is_moving = any(seen.is_busy or seen.life not in ("", WAKES_UP) for seen in waiting)
        if len(calls) > 1 and sees_all and not (calls <= _ONE_TO_ONE and is_moving):
            return Verdict.HANGS
        return Verdict.HANGS if is_long and sees_all and not is_moving else at_last
    return max(at_last, min(_of_other(seen, patience_s) for seen in others))


def _of_other(seen: RankState, patience_s: float) -> Verdict:
    """Judge a rank that the others wait for."""
    if seen.has_left or seen.is_stopped:
        return Verdict.HANGS
    if seen.is_busy or seen.idle_s < patience_s:
        return Verdict.FINE
    if seen.life and seen.idle_s < GRACE * patience_s:
        return Verdict.SUSPECT
    return Verdict.HANGS


def _nobody_waits(ranks: Sequence[RankState], patience_s: float, *, is_strict: bool) -> Verdict:
    """Judge ranks that are all in code of their own: several that trained and now do nothing at all are stuck."""
    living = [seen for seen in ranks if not seen.has_left]
    if len(living) < 2 or any(seen.is_busy or seen.life or seen.idle_s < patience_s for seen in living):
        return Verdict.FINE
    if not is_strict and not any(seen.has_trained for seen in living):
        return Verdict.FINE  # It may be no training at all, but a service that waits for requests.
    return Verdict.HANGS if all(seen.idle_s >= GRACE * patience_s for seen in living) else Verdict.SUSPECT


def _what(seen: RankState) -> str:
    """Return what tells calls apart: the operation, not the bucket or the line.

    A rank may be a bucket ahead, and ``if rank == 0: broadcast(...)`` with ``else: broadcast(...)`` is one call.
    """
    name = operation(seen) or ""
    if name.startswith("all_reduce of bucket "):
        return "all_reduce of bucket"
    # What was found by the user's line only may be anything.
    return place(seen) if name in ("wait", "synchronize") else name.partition(":")[0]


# Say who waits for whom: pure functions of what was seen of each rank.


def report(
    ranks: Sequence[RankState],
    patience_s: float,
    folder: str,
    verdict: Verdict,
    *,
    workers: Sequence[str] = (),
    num_nodes: int = 1,
    num_seen: int = 1,
) -> str:
    """Return the report: the ranks that keep the others waiting first.

    Args:
        ranks: What is seen of each.
        patience_s: What was set as patience.
        folder: Where the stacks are.
        verdict: What was found.
        workers: Where loader processes are.
        num_nodes: Machines in the job.
        num_seen: Machines whose ranks are among ``ranks``.
    """
    groups: dict[tuple[str, str], list[RankState]] = {}
    for seen in sorted(ranks, key=lambda seen: (operation(seen) is not None, seen.rank)):
        groups.setdefault((place(seen), _step(seen)), []).append(seen)
    lines = [_head(ranks, patience_s, verdict)]
    told = [_told(where, step, members, patience_s) for (where, step), members in groups.items()]
    lines += ["; ".join(told)] if len(told) <= 2 else told
    lines += workers
    lines += _meaning(ranks, num_nodes=num_nodes, num_seen=num_seen)
    lines += [f"rank {seen.rank} may be only slow: {seen.life}." for seen in _slow(ranks)]
    if num_seen < num_nodes:
        lines.append(
            f"Only {num_seen} of {num_nodes} machines could be seen; the others' launchers tell of their ranks."
        )
    lines.append(f"The Python stacks of {'all' if num_nodes == 1 else 'the'} ranks are in {folder}.")
    return "\n".join(lines)


def numbered(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(parts)}"


def _head(ranks: Sequence[RankState], patience_s: float, verdict: Verdict) -> str:
    nobody = not any(operation(seen) for seen in ranks)
    if verdict is Verdict.SUSPECT:
        what = "no rank has done anything" if nobody else "ranks have waited for each other"
        return f"The job may hang: {what} for {_least(ranks, nobody=nobody):.0f} s."
    what = "no rank has done anything" if nobody else "ranks have waited for each other"
    limit_s = GRACE * patience_s if nobody else patience_s
    return f"The job hangs: {what} for more than {limit_s:g} s."


def _least(ranks: Sequence[RankState], *, nobody: bool) -> float:
    return min(seen.idle_s for seen in ranks if not seen.has_left and (nobody or operation(seen)))


def _told(where: str, step: str, members: Sequence[RankState], patience_s: float) -> str:
    many = len(members) > 1
    text = where
    if many:
        for one, several in (("waits ", "wait "), ("is ", "are "), ("has ", "have "), ("was ", "were ")):
            if text.startswith(one):
                text = several + text.removeprefix(one)
        text = text.replace("does not answer", "do not answer", 1)
    first = members[0]
    if not first.has_left and not first.is_stopped and any(seen.idle_s >= patience_s for seen in members):
        text += f" for {max(seen.idle_s for seen in members):.0f} s"
    return f"{numbered(seen.rank for seen in members)} {text}{step}"


def _step(seen: RankState) -> str:
    if seen.has_left:
        return ""
    if seen.step is None:
        return f" [after {seen.num_steps} optimizer step{'s' * (seen.num_steps != 1)}]" if seen.num_steps else ""
    return f" [step {seen.step + 1}{f', {seen.phase}' if seen.phase else ''}]"


def _meaning(ranks: Sequence[RankState], *, num_nodes: int, num_seen: int) -> list[str]:
    calls = [operation(seen) for seen in ranks]
    called = sorted({call.partition(" of bucket")[0].partition(" (")[0] for call in calls if call})
    if any(call is None for call in calls):
        return []
    if len(called) > 1 or len({user_frame(seen.frames)[:2] for seen in ranks}) > 1:
        what = "different collectives" if len(called) > 1 else f"{called[0]} from different lines"
        return [f"The ranks call {what}: each must be called by all ranks, in the same order."]
    if num_seen < num_nodes:
        return ["All ranks of this machine wait in the same call: look at the report of the other machines."]
    return ["All ranks wait in the same call: the transfer itself hangs, or is slower than --watchdog allows."]


def _slow(ranks: Sequence[RankState]) -> list[RankState]:
    return [seen for seen in ranks if seen.life and operation(seen) is None and not seen.has_left]


# Have ranks, and their DataLoader workers, write their Python stacks, and keep them for the user.

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
        _request_stacks(pid)
    deadline = time.monotonic() + _RANK_S
    while time.monotonic() < deadline and any(_size(run_dir / f"stacks-{rank}") == starts[rank] for rank in pids):
        time.sleep(_PAUSE_S)
    time.sleep(5 * _PAUSE_S)  # those that have begun write on
    for rank, pid in pids.items():
        text = _from(run_dir / f"stacks-{rank}", starts[rank])
        (folder / f"rank-{rank}.txt").write_text(text or _last_seen(run_dir, rank))
        for child in sorted(set(process_tree(pid)) - {pid}):
            start = _size(run_dir / f"stacks-{rank}")
            if _request_stacks(child):
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


def _request_stacks(pid: int) -> bool:
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


_PERIOD_S = 0.5
_GLANCE_S = 0.1
_FAILED_S = 0.4
"""How long others may wait for a rank that has failed and does not end."""
_JUST_FAILED_S = 0.3
"""A rank writes that it has failed into one file, and a moment later into its beacon."""


class FailedRanks:
    """Ranks that have failed but whose processes go on: ended if others wait, so that these learn of it now.

    A rank counts as failed once its exception has left ``with lockstep.init()`` or the program.

    Args:
        run_dir: Where ranks leave their exceptions.
        num_nodes: Machines in the job.
    """

    def __init__(self, run_dir: Path, num_nodes: int) -> None:
        self._run_dir, self._num_nodes = run_dir, num_nodes
        self._since_s: dict[int, float] = {}

    def rest(self, over: threading.Event) -> bool:
        """Wait until it is time to check the ranks, soon if one has failed; return whether it is ``over``."""
        now_s = time.monotonic()
        dues = [since_s + _FAILED_S for since_s in self._since_s.values()]
        deadline = min([now_s + _PERIOD_S, *(due for due in dues if due > now_s)])
        while not over.wait(min(_GLANCE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._has_just_failed():
                return False
        return True

    def end(self, seen: Sequence[RankState], pids: Mapping[int, int]) -> None:
        """Kill those for which others have waited for long enough."""
        now_s = time.monotonic()
        # Of several machines, those that wait may be elsewhere.
        is_awaited = self._num_nodes > 1 or any(operation(each) is not None for each in seen)
        for each in seen:
            pid = pids.get(each.rank)
            if pid is None or not each.failure:
                self._since_s.pop(each.rank, None)
            elif now_s - self._since_s.setdefault(each.rank, now_s) >= _FAILED_S and is_awaited:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _has_just_failed(self) -> bool:
        for path in self._run_dir.glob("failure-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < _JUST_FAILED_S:
                    return True
        return False


# A thread in the launcher that reads the ranks' beacons: reports a job that hangs, and ends a rank that has failed.

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
        is_strict: See `lockstep.telemetry.watchdog.judge`.
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
        bulletin: InterNodeStore | None,
        resources: Resources,
        on_report: Callable[[str, Verdict, dict[int, int]], bool],
        on_slow: Callable[[str], None],
    ) -> None:
        self._run_dir, self._patience_s, self._is_strict = run_dir, patience_s, is_strict
        self._num_nodes, self._bulletin = num_nodes, bulletin
        self._resources, self._on_report = resources, on_report
        self._pace = PaceKeeper(on_slow)
        self._over = threading.Event()
        self._lives: dict[int, Liveness] = {}
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

    def _tell(self, seen: list[RankState], pids: dict[int, int], verdict: Verdict, num_seen: int) -> bool:
        folder = keep_stacks(self._run_dir, pids)
        if self._over.is_set():  # The job has ended meanwhile.
            shutil.rmtree(folder, ignore_errors=True)
            return False
        awaited = {each.rank for each in seen if operation(each) is None} or {each.rank for each in seen}
        nodes = {"num_nodes": self._num_nodes, "num_seen": num_seen}
        workers = busy_workers(folder, sorted(awaited & set(pids)))
        text = report(seen, self._patience_s, folder, verdict, workers=workers, **nodes)
        return self._on_report(text, verdict, {rank: pid for rank, pid in pids.items() if rank in awaited})

    def _look(self) -> tuple[list[RankState], dict[int, int]]:
        """Return what is seen of each rank of this machine, and the process of each that lives."""
        found, pids = [], {}
        for path in self._run_dir.glob("beacon-*"):
            try:
                said = json.loads(path.read_bytes())
            except ValueError:  # It is being written.
                return [], {}
            rank, pid = int(path.name.partition("-")[2]), said["pid"]
            state, _ = process_state(pid)
            if state in ("", "Z", "X"):
                found.append(RankState(rank, has_left=True))
                continue
            pids[rank] = pid
            self._resources.devices[rank] = [DeviceMemory(*each) for each in said["devices"]]
            found.append(self._seen(rank, said, is_stopped=state in ("T", "t")))
            self._pace.take(rank, said["pace"])
        self._pace.judge(len(pids))
        return found, pids

    def _seen(self, rank: int, said: dict[str, Any], *, is_stopped: bool) -> RankState:
        now_s = time.monotonic()
        still_s, silent_s = now_s - said["moved_ns"] / 1e9, now_s - said["beat_ns"] / 1e9
        life = self._lives.setdefault(rank, Liveness(self._patience_s))
        if max(still_s, silent_s) < _SETTLED_S:
            life.clear()
        elif HAS_PROC:
            life.add(sample(said["pid"], own_bytes=said["num_bytes"]))
        signs = life.signs()
        if outside := waits_outside(said["frames"]):
            signs = signs or f"it waits for {outside}"
        return RankState(
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
            uses_gpu=said["uses_gpu"],
        )

    def _merged(self, seen: list[RankState]) -> tuple[list[RankState], int]:
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
            everywhere += [RankState(**each) for each in note["ranks"]]
        return everywhere, num_seen


def _bare(seen: RankState) -> RankState:
    """Return ``seen`` with the few frames that matter elsewhere, where the files may not be the same."""
    return replace(seen, frames=list(seen.frames)[:20])
