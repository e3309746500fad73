"""Hang detection: a thread in the launcher reads the ranks' heartbeats; reports hangs, and ends a rank that has failed.

The rule by which a job hangs is in docs/design/launcher.md; `judge` is all of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any

from lockstep.activity import CLOSE, DEVICE, format_ranks
from lockstep.comm.rendezvous import poll_until
from lockstep.comm.store import InterNodeStore
from lockstep.run_folder import FAILURE, HEARTBEAT, STACKS, rank_file, rank_files
from lockstep.telemetry import rank_state
from lockstep.telemetry.heartbeat import STACKS_SIGNAL, read_heartbeat
from lockstep.telemetry.rank_state import STOPPED, WAKES_UP, Liveness, RankState, operation, place, user_frame, where_of
from lockstep.telemetry.resources import Resources

# --- whether the job hangs --------------------------------------------------------------------------------------------

# A rank that may only be slow can keep the others waiting this many times longer than an idle one.
GRACE = 5.0

# Calls with different names that match each other.
_ONE_TO_ONE = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"}


class Verdict(IntEnum):
    """The state of the job."""

    FINE = 0
    # It is reported only, as the ranks may continue.
    SUSPECT = 1
    # The ranks will not continue.
    HANGS = 2


def judge(ranks: Sequence[RankState], patience_s: float, *, is_strict: bool, sees_all: bool = True) -> Verdict:
    """Decide whether some ranks wait for others that will not arrive.

    Args:
        ranks: The state of each rank.
        patience_s: How long a rank may wait for an idle one.
        is_strict: Whether computing, or a transfer, is limited to ``GRACE`` times that; otherwise it has no limit.
        sees_all: Whether ``ranks`` are all ranks of the job.
    """
    if not ranks or any(rank_state.is_debugged(seen) for seen in ranks):
        return Verdict.FINE  # the others wait for a person at a debugger
    waiting = [seen for seen in ranks if operation(seen) is not None]
    others = [seen for seen in ranks if operation(seen) is None]
    if not waiting:
        return _judge_without_waiting(ranks, patience_s, is_strict=is_strict)
    # The last rank counts, as the collective may have begun only then.
    waits_s = min(seen.still_s for seen in waiting)
    if waits_s < patience_s:
        return Verdict.FINE
    is_long = waits_s >= GRACE * patience_s
    at_last = (Verdict.HANGS if is_strict else Verdict.SUSPECT) if is_long else Verdict.FINE
    if others:
        return max(at_last, min(_judge_awaited(seen, patience_s) for seen in others))
    # A host that waits for its device knows no collective, and the device may compute.
    calls = {_call(seen) for seen in waiting if operation(seen) != DEVICE}
    # If all ranks are in the same call, the transfer may be slow; then there are signs of it.
    is_moving = any(seen.is_busy or seen.life not in ("", WAKES_UP) or operation(seen) == DEVICE for seen in waiting)
    differ = len(calls) > 1 and not (calls <= _ONE_TO_ONE and is_moving)
    return Verdict.HANGS if sees_all and (differ or (is_long and not is_moving)) else at_last


def _judge_awaited(seen: RankState, patience_s: float) -> Verdict:
    """Judge a rank that the others wait for."""
    if seen.has_left or seen.is_stopped:
        return Verdict.HANGS
    if seen.is_busy or seen.idle_s < patience_s:
        return Verdict.FINE
    return Verdict.SUSPECT if seen.life and seen.idle_s < GRACE * patience_s else Verdict.HANGS


def _judge_without_waiting(ranks: Sequence[RankState], patience_s: float, *, is_strict: bool) -> Verdict:
    """Judge ranks of which none is in a collective: they hang if they have trained, and are idle now.

    A rank hangs, too, if it is idle after all others have ended. Of a single rank only SIGSTOP is a sign of that.
    """
    living = [seen for seen in ranks if not seen.has_left]
    moving = [seen for seen in living if (seen.is_busy or seen.life) and not seen.is_stopped]
    if not living or moving or any(seen.idle_s < patience_s for seen in living):
        return Verdict.FINE
    # A single rank may wait for anything; ranks that have not trained may be a service that waits for requests.
    is_alone = len(ranks) == 1 and not living[0].is_stopped
    if is_alone or not (is_strict or any(seen.has_trained for seen in living)):
        return Verdict.FINE
    if len(living) == 1 and not is_strict:
        return Verdict.SUSPECT  # It may wait for something that only its script knows.
    return Verdict.HANGS if all(seen.idle_s >= GRACE * patience_s for seen in living) else Verdict.SUSPECT


def _call(seen: RankState) -> str:
    """Return the operation by which calls are compared, without bucket and line.

    A rank may be a bucket ahead, and two lines may contain the same call, as in ``if rank == 0: broadcast(...)`` with
    ``else: broadcast(...)``.
    """
    name = operation(seen) or ""
    if name in ("wait", "synchronize"):
        return place(seen)  # known only by the line of the script, which may wait for anything
    return "all_reduce of a bucket" if seen.bucket else name.partition(":")[0]


# --- the report -------------------------------------------------------------------------------------------------------


def report(ranks: list[RankState], patience_s: float, verdict: Verdict, num_nodes: int = 1, num_seen: int = 1) -> str:
    """Return the report: the ranks that keep the others waiting first.

    Args:
        ranks: The state of each rank.
        patience_s: The patience that was set.
        verdict: The verdict of `judge`.
        num_nodes: Number of machines in the job.
        num_seen: Number of machines whose ranks are in ``ranks``.
    """
    groups: dict[tuple[str, str], list[RankState]] = {}
    for seen in sorted(ranks, key=lambda seen: (operation(seen) is not None, seen.rank)):
        groups.setdefault((place(seen), _step(seen)), []).append(seen)
    described = [_described(where, step, members, patience_s) for (where, step), members in groups.items()]
    lines = [_headline(ranks, patience_s, verdict)]
    lines += ["; ".join(described)] if len(described) <= 2 else described
    if all(operation(seen) for seen in ranks):
        lines.append(_explanation(ranks, sees_all=num_seen >= num_nodes))
    lines += _recorded_calls(ranks) if any(operation(seen) == DEVICE for seen in ranks) else []
    slow = [seen for seen in ranks if seen.life and operation(seen) is None and not seen.has_left]
    lines += [f"rank {seen.rank} may only be slow: {seen.life}." for seen in slow]
    if num_seen < num_nodes:
        known = f"Only {num_seen} of {num_nodes} machines are known here"
        lines.append(f"{known}; the launchers of the others report their ranks.")
    return "\n".join(lines)


def _headline(ranks: Sequence[RankState], patience_s: float, verdict: Verdict) -> str:
    nobody_waits = not any(operation(seen) for seen in ranks)
    what = "no rank has done anything" if nobody_waits else "ranks have waited for each other"
    if verdict is Verdict.SUSPECT:
        least_s = min(seen.idle_s for seen in ranks if not seen.has_left and (nobody_waits or operation(seen)))
        return f"The job may hang: {what} for {least_s:.0f} s."
    return f"The job hangs: {what} for more than {GRACE * patience_s if nobody_waits else patience_s:g} s."


_PLURALS = {"waits": "wait", "is": "are", "has": "have", "was": "were", "does": "do"}


def _described(where: str, step: str, members: Sequence[RankState], patience_s: float) -> str:
    first, text = members[0], where
    if len(members) > 1:
        verb, _, rest = where.partition(" ")
        text = f"{_PLURALS.get(verb, verb)} {rest}".replace("its device", "their devices", 1)
    if not first.has_left and not first.is_stopped and any(seen.idle_s >= patience_s for seen in members):
        text += f" for {max(seen.idle_s for seen in members):.0f} s"
    return f"{format_ranks([seen.rank for seen in members])} {text}{step}"


def _step(seen: RankState) -> str:
    if seen.step is None:
        return f" [after {seen.num_steps} optimizer step{'s' * (seen.num_steps != 1)}]" if seen.num_steps else ""
    return f" [step {seen.step + 1}{f', {seen.phase}' if seen.phase else ''}]"


def _explanation(ranks: Sequence[RankState], *, sees_all: bool) -> str:
    """Return why all ranks wait."""
    called = sorted({(operation(seen) or "").partition(" of bucket")[0].partition(" (")[0] for seen in ranks})
    if DEVICE in called:
        return "All ranks wait, some of them for their devices, which may compute, or be in a collective."
    if len(called) > 1 or len({user_frame(seen.frames)[:2] for seen in ranks}) > 1:
        what = "different collectives" if len(called) > 1 else f"{called[0]} from different lines"
        return f"The ranks call {what}: each must be called by all ranks, in the same order."
    if not sees_all:
        return "All ranks that are known here wait in the same call: see the reports of the other machines."
    return "All ranks wait in the same call: the transfer itself hangs, or is slower than --watchdog allows."


def _recorded_calls(ranks: Sequence[RankState]) -> list[str]:
    """Return a line with the collective that each rank is in by torch's record; a host does not know it on NCCL."""
    calls: dict[str, list[int]] = {}
    for seen in sorted(ranks, key=lambda seen: operation(seen) is not None):
        calls.setdefault(seen.recorded_call, []).append(seen.rank)
    known = [f"{call} ({format_ranks(found)})" for call, found in calls.items() if call]
    return [f"The collectives in torch's record: {'; '.join(known)}."] if known else []


# --- several machines -------------------------------------------------------------------------------------------------

_TOPIC, _JUDGED = "ranks", "judged"
# Launchers post only while their ranks are idle: older notes and judgements are not valid.
_STALE_S = 10.0
# With more than half as many machines, they exchange less often than they check, as the judge reads all notes.
_NODES_A_SECOND = 64
_NUM_FRAMES_ELSEWHERE = 20


@dataclass(frozen=True)
class Judgement:
    """The verdict about the ranks of all machines that are known.

    Attributes:
        number: Counts the judgements of this job.
        verdict: The state of the job.
        text: The report; empty if the job is fine.
        all_wait: Whether all ranks are in collectives.
    """

    number: int
    verdict: Verdict
    text: str
    all_wait: bool


class SharedJudgement:
    """A judgement that one launcher makes for the launchers of all machines.

    [Note: one launcher judges for all]
    If every launcher read the states of all ranks, the bytes would grow with the square of the machines. Instead, each
    launcher posts the states of its ranks, one of them (the judge) reads all and publishes a judgement, and the others
    read only that. The first launcher that finds no judgement, or no new one for `_STALE_S`, becomes the judge; a
    counter in the store admits one. So a judge is replaced if it is lost, or if its own ranks continue. No launcher
    waits: until there is a judgement, each judges the ranks of its own machine.

    Args:
        store: The store through which the launchers communicate.
        num_nodes: Number of machines in the job.
        judge: Makes a judgement from its number, the states of ranks, and the number of machines that these are on.
    """

    def __init__(self, store: InterNodeStore, num_nodes: int, judge: Callable[..., Judgement]) -> None:
        self._store, self._judge = store, judge
        self._period_s = num_nodes / _NODES_A_SECOND
        self._stale_s = max(_STALE_S, 3 * self._period_s)
        self._num_posts, self._is_judge = 0, False
        # By the first rank of a machine: the number of its last note, and when that number changed.
        self._notes: dict[int, tuple[int, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Ignore all judgements made so far, as the ranks of this machine have continued."""
        self._latest: Judgement | None = None
        self._number: int | None = None
        self._since_s = self._next_s = -math.inf

    def update(self, seen: Sequence[RankState]) -> Judgement | None:
        """Post the states of this machine's ranks, if that is due; return the judgement if it is still valid."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._period_s
            self._exchange(seen, now_s)
        return self._latest if now_s - self._since_s <= self._stale_s else None

    def _exchange(self, seen: Sequence[RankState], now_s: float) -> None:
        self._num_posts += 1
        # Few frames, to keep the notes small.
        bare = [asdict(replace(each, frames=list(each.frames)[:_NUM_FRAMES_ELSEWHERE])) for each in seen]
        if not self._store.post(_TOPIC, {"count": self._num_posts, "ranks": bare}):
            self.forget()
            return
        made = None
        if self._is_judge:
            # Notes may be old, too: only those that change count.
            others = list(self._read_others(now_s, -math.inf if self._number is None else now_s))
            if self._number is not None:
                made = self._judge(self._number + 1, [*seen, *chain.from_iterable(others)], 1 + len(others))
        note = self._store.least(_JUDGED, lambda note: -note["number"], made and asdict(made))
        found = None
        with contextlib.suppress(TypeError, ValueError, LookupError):  # other programs can write to the store
            found = note and Judgement(**note | {"verdict": Verdict(note["verdict"])})
        self._is_judge &= made in (None, found)  # otherwise another one has taken over
        number = found.number if found else 0
        if number != self._number:
            # The first one after `forget` may be old.
            self._latest = None if self._number is None else found
            self._number, self._since_s = number, now_s
        age_s = now_s - self._since_s
        if not self._is_judge and (number == 0 or age_s > self._stale_s):
            self._is_judge = self._store.count(f"{_JUDGED}/{number}/{age_s // self._stale_s:.0f}", 1) == 1
            if self._is_judge:
                self.forget()

    def _read_others(self, now_s: float, since_s: float) -> Iterator[list[RankState]]:
        """Yield the states that the other launchers posted, unless stale; a new note counts as of ``since_s``."""
        for note in self._store.others(_TOPIC):
            with contextlib.suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
                # Other programs can write to the store: wrong notes are ignored.
                number, states = int(note["count"]), [RankState(**each) for each in note["ranks"]]
                first = states[0].rank
                if self._notes.get(first, (-1, 0.0))[0] != number:
                    self._notes[first] = number, since_s
                if now_s - self._notes[first][1] <= self._stale_s:  # otherwise its ranks continue, or it has ended
                    yield states


# --- the stacks of ranks and of their loader processes ----------------------------------------------------------------

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_AT_REST = ("selectors.py", "connection.py", "queues.py", "threading.py")
# How long a process has to write its stacks, and how often to check; it writes all of them at once.
_STACKS_S = 0.5
_PAUSE_S = 0.02


def keep_stacks(run_dir: Path, pids: Mapping[int, int]) -> str:
    """Write the stacks of each rank, and of its child processes, to files in a new folder; return the folder.

    Args:
        run_dir: The folder of the heartbeats.
        pids: The processes of the living ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix="lockstep-hang-"))
    for rank, pid in pids.items():
        # Processes that the rank has forked write to the file of the rank, so they are asked one after the other.
        for each in set(rank_state.process_tree(pid)):
            if text := _stacks_of(each, rank_file(run_dir, STACKS, rank)):
                (folder / f"rank-{rank}{f'-process-{each}' * (each != pid)}.txt").write_text(text)
    return str(folder)


_STOPPED_TEXT = "stopped by a signal (SIGSTOP)\n"


def busy_workers(folder: str, ranks: Iterable[int]) -> list[str]:
    """Return a sentence for each DataLoader worker of ``ranks`` that is not waiting for work.

    Args:
        folder: The folder that `keep_stacks` returned.
        ranks: The ranks whose workers are checked.
    """
    found = []
    for rank in ranks:
        for path in sorted(Path(folder).glob(f"rank-{rank}-process-*.txt")):
            pid, text = path.stem.rpartition("-")[2], path.read_text()
            frames = [(file, int(line), function) for file, line, function in _FRAME.findall(text)]
            if text == _STOPPED_TEXT:
                found.append(f"process {pid}, started by rank {rank}, was stopped by a signal (SIGSTOP)")
            elif any(function == "_worker_loop" for _, _, function in frames) and not frames[0][0].endswith(_AT_REST):
                file, line, function = user_frame(frames)
                found.append(f"loader process {pid} of rank {rank} is in {function} ({where_of(file, line)})")
    return found


def _stacks_of(pid: int, file: Path) -> str:
    """Return the stacks that a process writes to ``file`` at our signal; empty if it does not handle that."""
    if rank_state.process_state(pid)[0] in STOPPED:
        return _STOPPED_TEXT
    with contextlib.suppress(OSError):  # it has just ended
        handled = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        if handled and int(handled[1], 16) >> (STACKS_SIGNAL - 1) & 1:  # it would kill other processes
            file.write_text("")
            os.kill(pid, STACKS_SIGNAL)
            poll_until(lambda: file.stat().st_size > 0, _STACKS_S, _PAUSE_S)
            time.sleep(5 * _PAUSE_S)  # until it has written all
            return file.read_text(errors="replace")
    return ""


# --- the thread -------------------------------------------------------------------------------------------------------

_PERIOD_S = 0.5
_POLL_S = 0.1
# How long others may wait for a rank that has failed and does not exit.
_FAILED_S = 0.4
# A rank is sampled after so many seconds at one place.
_SETTLED_S = 1.0
# After so many reports of a suspected hang, only a certain one is reported.
_NUM_REPORTS = 5


@dataclass
class Watchdog:
    """Watches the ranks of this machine in a ``with`` block; does nothing if ``patience_s`` is zero.

    Args:
        run_dir: The folder of the heartbeats.
        patience_s: How long ranks may wait for each other.
        is_strict: See `judge`.
        num_nodes: Number of machines in the job.
        store: The store through which the launchers of several machines communicate.
        resources: Records the memory of the ranks.
        on_report: Called from the thread of the watchdog with each report, the verdict, and the processes by rank of
            this machine's ranks that keep the others waiting; returns whether to continue watching.
    """

    run_dir: Path
    patience_s: float
    is_strict: bool
    num_nodes: int
    store: InterNodeStore | None
    resources: Resources
    on_report: Callable[[str, Verdict, dict[int, int]], bool]

    def __post_init__(self) -> None:
        self._shared = None
        if self.store is not None:
            self._shared = SharedJudgement(self.store, self.num_nodes, self._judgement)
        self._over = threading.Event()
        self._liveness: dict[int, Liveness] = {}
        self._failed_since_s: dict[int, float] = {}
        self._reported, self._num_reports = Verdict.FINE, 0
        self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.patience_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        continues, last_error, next_s = True, "", time.monotonic() + _PERIOD_S
        while continues and not self._over.wait(_POLL_S):
            # After a rank has failed, others may wait for it, so all ranks are checked ten times a second.
            if time.monotonic() < next_s and not rank_files(self.run_dir, FAILURE):
                continue
            next_s = time.monotonic() + _PERIOD_S
            try:
                continues = self._check()
            except Exception as error:
                # Without this thread, a hanging job would hang forever.
                if (text := f"{type(error).__name__}: {error}") != last_error:
                    last_error = text
                    print(f"lockstep: the watchdog continues after an internal error: {text}", file=sys.stderr)

    def _check(self) -> bool:
        """Check all ranks once, and report a new verdict; return whether to continue watching."""
        seen, pids = self._read_ranks()
        if not seen:
            return True
        self.resources.update(pids)
        self._end_failed(seen, pids)
        shared = None
        if self._shared is not None and any(each.idle_s >= self.patience_s / 2 for each in seen):
            shared = self._shared.update(seen)
        elif self._shared is not None:
            self._shared.forget()
        found = shared or self._judgement(0, seen, 1)
        if found.verdict is Verdict.FINE:
            self._reported = found.verdict
        elif found.verdict > self._reported and (found.verdict is Verdict.HANGS or self._num_reports < _NUM_REPORTS):
            self._reported, self._num_reports = found.verdict, self._num_reports + 1
            return self._report(seen, pids, found)
        return True

    def _judgement(self, number: int, ranks: list[RankState], num_seen: int) -> Judgement:
        # All may wait for a rank of a machine whose states are not known.
        verdict = judge(ranks, self.patience_s, is_strict=self.is_strict, sees_all=num_seen >= self.num_nodes)
        text = report(ranks, self.patience_s, verdict, self.num_nodes, num_seen) if verdict else ""
        return Judgement(number, verdict, text, all(operation(each) is not None for each in ranks))

    def _report(self, seen: list[RankState], pids: dict[int, int], found: Judgement) -> bool:
        folder = keep_stacks(self.run_dir, pids)
        if self._over.is_set():  # The job has ended meanwhile.
            shutil.rmtree(folder, ignore_errors=True)
            return False
        awaited = {each.rank for each in seen if found.all_wait or operation(each) is None}
        workers = busy_workers(folder, sorted(awaited & set(pids)))
        stacks = f"The Python stacks of {'all' if self.num_nodes == 1 else 'the'} ranks are in {folder}."
        processes = f"Their PIDs: {', '.join(f'{pid} (rank {rank})' for rank, pid in pids.items())}."
        text = "\n".join([found.text, *workers, stacks, processes])
        return self.on_report(text, found.verdict, {rank: pid for rank, pid in pids.items() if rank in awaited})

    def _end_failed(self, seen: Sequence[RankState], pids: Mapping[int, int]) -> None:
        """Kill ranks that have failed but do not exit, if others wait for them.

        A rank has failed when its exception has left ``with lockstep.init()`` or the program.
        """
        now_s = time.monotonic()
        # With several machines, those that wait may be on others.
        is_awaited = self.num_nodes > 1 or any(operation(each) is not None for each in seen)
        for each in seen:
            pid = pids.get(each.rank)
            if pid is None or not each.failure:
                self._failed_since_s.pop(each.rank, None)
            elif now_s - self._failed_since_s.setdefault(each.rank, now_s) >= _FAILED_S and is_awaited:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _read_ranks(self) -> tuple[list[RankState], dict[int, int]]:
        """Return the state of each rank of this machine, and the processes of those that live."""
        found, pids = [], {}
        for rank in sorted(rank_files(self.run_dir, HEARTBEAT)):
            heartbeat = read_heartbeat(self.run_dir, rank)
            if not heartbeat:
                return [], {}  # This rank may be the one that the others wait for; its next heartbeat comes soon.
            state, _ = rank_state.process_state(heartbeat["pid"])
            if state:
                pids[rank] = heartbeat["pid"]
                self.resources.devices[rank] = heartbeat["devices"]
            found.append(self._state(rank, heartbeat, state))
        return found, pids

    def _state(self, rank: int, heartbeat: Mapping[str, Any], process_state: str) -> RankState:
        reported = {each.name: heartbeat[each.name] for each in fields(RankState) if each.name in heartbeat}
        is_stopped = process_state in STOPPED
        if not process_state or (heartbeat["collective"] == CLOSE and not is_stopped):
            return RankState(rank, has_left=True, **reported)
        now_s, life = time.monotonic(), self._liveness.setdefault(rank, Liveness(self.patience_s))
        times = {"still_s": now_s - heartbeat["moved_ns"] / 1e9, "silent_s": now_s - heartbeat["beat_ns"] / 1e9}
        if max(times.values()) < _SETTLED_S:
            life.samples.clear()
        else:
            life.add(rank_state.sample(heartbeat["pid"], own_bytes=heartbeat["num_bytes"]))
        signs = life.signs() or rank_state.waits_outside(heartbeat["frames"])
        return RankState(rank, is_busy=life.is_busy, life=signs, is_stopped=is_stopped, **times, **reported)
