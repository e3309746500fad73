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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.base.activity import DEVICE, REJOIN, format_ranks
from lockstep.base.env import process_tree
from lockstep.base.rank_files import HEARTBEAT, STACKS, files_by_rank, rank_file, read_object
from lockstep.comm.rendezvous import poll_until
from lockstep.comm.store import InterNodeStore
from lockstep.health import rank_state
from lockstep.health.heartbeat import STACKS_SIGNAL
from lockstep.health.rank_state import COMPUTES, DEBUGGED, ENDED, STOPPED, WAKES_UP, RankState
from lockstep.telemetry.resources import Resources

# --- whether the job hangs --------------------------------------------------------------------------------------------

# A rank that may only be slow can keep the others waiting this many times longer than an idle one.
GRACE = 5.0
# So long may a rank on a GPU wait in the first step: with --max-restarts, no time-out of NCCL ends that.
_FIRST_STEP_S = 1800.0

# Calls with different names that match each other.
_ONE_TO_ONE = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"}


class Verdict(IntEnum):
    """The state of the job."""

    FINE = 0
    # It is reported only: no rank has done a step, and until then one may download or prepare data for very long.
    EARLY = 1
    # It is reported only, as the ranks may continue.
    SUSPECT = 2
    # The ranks will not continue.
    HANGS = 3


def judge(ranks: Sequence[RankState], patience_s: float, *, is_strict: bool, sees_all: bool = True) -> Verdict:
    """Decide whether some ranks wait for others that will not arrive.

    Args:
        ranks: The state of each rank.
        patience_s: How long a rank may wait for an idle one.
        is_strict: Whether computing, or a transfer, is limited to ``GRACE`` times that; otherwise it has no limit.
        sees_all: Whether ``ranks`` are all ranks of the job.
    """
    if not ranks or any(seen.life == DEBUGGED for seen in ranks):
        return Verdict.FINE  # the others wait for a person at a debugger
    # Without --watchdog, the process group's own time-out is the limit of the first step.
    waits_long = any(seen.uses_gpu and seen.operation and seen.idle_s > _FIRST_STEP_S for seen in ranks)
    is_early = not is_strict and not waits_long and not any(seen.num_steps for seen in ranks)
    verdict = _verdict_of(ranks, patience_s, is_strict=is_strict, sees_all=sees_all, is_early=is_early)
    return Verdict.EARLY if is_early and verdict is Verdict.SUSPECT else verdict


def _verdict_of(
    ranks: Sequence[RankState], patience_s: float, *, is_strict: bool, sees_all: bool, is_early: bool
) -> Verdict:
    """Judge ranks; if they are early, only those that can never go on hang."""
    waiting = [seen for seen in ranks if seen.operation]
    others = [seen for seen in ranks if not seen.operation]
    if not waiting:
        return _judge_without_waiting(ranks, patience_s, is_strict=is_strict, is_early=is_early)
    # The last rank counts, as the collective may have begun only then.
    waits_s = min(seen.idle_s for seen in waiting)
    # A rank that takes the place of a lost one may build for long, as all do before they meet first.
    is_strict = is_strict and not any(seen.operation == REJOIN for seen in waiting)
    if waits_s < patience_s:
        return Verdict.FINE
    is_long = waits_s >= GRACE * patience_s
    at_last = (Verdict.HANGS if is_strict else Verdict.SUSPECT) if is_long else Verdict.FINE
    if others:
        return max(at_last, min(_judge_awaited(seen, patience_s, is_early=is_early) for seen in others))
    # A host that waits for its device knows no collective, and the device may compute.
    calls = {_call(seen) for seen in waiting if seen.operation != DEVICE}
    # If all ranks are in the same call, the transfer may be slow; then there are signs of it.
    is_moving = any(seen.life not in ("", WAKES_UP) or seen.operation == DEVICE for seen in waiting)
    differ = len(calls) > 1 and not (calls <= _ONE_TO_ONE and is_moving)
    return Verdict.HANGS if sees_all and (differ or (is_long and not is_moving and not is_early)) else at_last


def _judge_awaited(seen: RankState, patience_s: float, *, is_early: bool) -> Verdict:
    """Judge a rank that the others wait for."""
    if seen.life in (ENDED, STOPPED):
        return Verdict.HANGS
    if seen.life == COMPUTES or seen.idle_s < patience_s:
        return Verdict.FINE
    return Verdict.SUSPECT if is_early or (seen.life and seen.idle_s < GRACE * patience_s) else Verdict.HANGS


def _judge_without_waiting(
    ranks: Sequence[RankState], patience_s: float, *, is_strict: bool, is_early: bool
) -> Verdict:
    """Judge ranks of which none is in a collective: they hang if they have done a step, and are idle now.

    A rank hangs, too, if it is idle after all others have ended. Of a single rank only SIGSTOP is a sign of that.
    """
    living = [seen for seen in ranks if seen.life != ENDED]
    idle_s = min((seen.idle_s for seen in living), default=0.0)
    if idle_s < patience_s or any(seen.life not in ("", STOPPED) for seen in living):
        return Verdict.FINE
    is_long = idle_s >= GRACE * patience_s
    # A single rank may wait for anything; ranks that have done no step may prepare, or wait for requests.
    if (len(ranks) == 1 and living[0].life != STOPPED) or (is_early and not is_long):
        return Verdict.FINE
    # The last one may wait for something that only its script knows.
    return Verdict.HANGS if is_long and not is_early and (is_strict or len(living) > 1) else Verdict.SUSPECT


def _call(seen: RankState) -> str:
    """Return the operation by which calls are compared, without bucket and line.

    A rank may be a bucket ahead, and two lines may contain the same call, as in ``if rank == 0: broadcast(...)`` with
    ``else: broadcast(...)``.
    """
    name = seen.operation
    if name in ("wait", "synchronize"):
        return seen.place  # known only by the line of the script, which may wait for anything
    return re.sub(r" bucket \d.*", " a bucket", name)


# --- the report -------------------------------------------------------------------------------------------------------


_PLURALS = {"waits": "wait", "is": "are", "has": "have", "was": "were", "does": "do"}


def report(ranks: list[RankState], patience_s: float, verdict: Verdict, num_nodes: int = 1, num_seen: int = 1) -> str:
    """Return the report: the ranks that keep the others waiting first.

    Args:
        ranks: The state of each rank.
        patience_s: The patience that was set.
        verdict: The verdict of `judge`.
        num_nodes: Number of machines in the job.
        num_seen: Number of machines whose ranks are in ``ranks``.
    """
    awaited = [seen for seen in ranks if not seen.operation]
    nobody_waits, is_suspect = len(awaited) == len(ranks), verdict < Verdict.HANGS
    what = "no rank has done anything" if nobody_waits else "ranks have waited for each other"
    for_s = GRACE * patience_s if nobody_waits and verdict is not Verdict.SUSPECT else patience_s
    lines = [f"The job {'may hang' if is_suspect else 'hangs'}: {what} for more than {for_s:g} s."]
    groups: dict[tuple[str, str], list[RankState]] = {}
    for seen in sorted(ranks, key=lambda seen: (bool(seen.operation), seen.rank)):
        groups.setdefault((seen.place, seen.in_step), []).append(seen)
    described = [_described(members, patience_s) for members in groups.values()]
    lines += ["; ".join(described)] if len(described) <= 2 else described
    slow = [seen for seen in awaited if seen.life not in ("", ENDED, STOPPED)]
    lines += [f"rank {seen.rank} may only be slow: {seen.life}." for seen in slow]
    if num_seen < num_nodes:
        sentence = f"Only {num_seen} of {num_nodes} machines are known here"
        lines.append(f"{sentence}; the launchers of the others report their ranks.")
    elif not awaited:
        lines.append(_explanation(ranks))
    elif not is_suspect and any(seen.life not in (ENDED, STOPPED) for seen in awaited):
        lines.append(f"If a rank may need more than {for_s:g} s, pass a larger --watchdog SECONDS.")
    return "\n".join(lines)


def _described(members: Sequence[RankState], patience_s: float) -> str:
    """Describe ranks that are at one place, in one step."""
    first, place = members[0], members[0].place
    if len(members) > 1:
        verb, _, rest = place.partition(" ")
        place = f"{_PLURALS.get(verb, verb)} {rest}".replace("its device", "their devices", 1)
    idle_s = max(seen.idle_s for seen in members)
    duration = f" for {idle_s:.0f} s" if idle_s >= patience_s and first.life != STOPPED else ""
    step = f" [{first.in_step}]" if first.in_step else ""
    return f"{format_ranks([seen.rank for seen in members])} {place}{duration}{step}"


def _explanation(ranks: Sequence[RankState]) -> str:
    """Return why all ranks wait."""
    called = sorted({re.sub(r" of bucket.*| \(.*", "", seen.operation) for seen in ranks})
    if DEVICE in called:
        return "All ranks wait, some of them for their devices, which may compute, or be in a collective."
    if len(called) > 1 or len({seen.place.rpartition("(")[2] for seen in ranks}) > 1:
        what = "different collectives" if len(called) > 1 else f"{called[0]} from different lines"
        return f"The ranks call {what}: each must be called by all ranks, in the same order."
    return "All ranks wait in the same call: the transfer itself hangs, or is slower than --watchdog allows."


# --- several machines -------------------------------------------------------------------------------------------------

# Launchers post only while their ranks are idle: older notes are not valid.
_STALE_S = 10.0
# With more than half as many machines, they exchange less often than they check, as the judge reads all notes.
_NODES_A_SECOND = 64


class Judgement(NamedTuple):
    """The verdict about the ranks of all machines that are known.

    Attributes:
        verdict: The state of the job.
        text: The report; empty if the job is fine.
        all_wait: Whether all ranks are in collectives.
    """

    verdict: Verdict
    text: str
    all_wait: bool


class SharedJudgement:
    """A judgement that one launcher makes for the launchers of all machines.

    [Note: one launcher judges for all]
    If every launcher read the states of all ranks, the bytes would grow with the square of the machines. Instead, each
    launcher posts the states of its ranks, that of rank zero (the judge) reads all and publishes a judgement, and the
    others read only that; each does so only while its ranks are idle. No launcher waits: without a judgement, each
    judges the ranks of its own machine. If the judge is lost, rank zero is lost as well, and the job with it.

    Args:
        store: The store through which the launchers communicate.
        num_nodes: Number of machines in the job.
        judge: Makes a judgement from the states of ranks, and the number of machines that these are on.
    """

    def __init__(self, store: InterNodeStore, num_nodes: int, judge: Callable[..., Judgement]) -> None:
        self._store, self._judge = store, judge
        self._period_s = num_nodes / _NODES_A_SECOND
        self._latest: Judgement | None = None
        self._next_s = -math.inf
        # By key: the last note, and when that changed.
        self._notes: dict[str, tuple[Any, float]] = {}

    def update(self, seen: Sequence[RankState], *, is_idle: bool) -> Judgement | None:
        """Post the states of this machine's ranks, if that is due; return the judgement if it is still valid.

        Args:
            seen: The states.
            is_idle: Whether one of these ranks may hang. If not, earlier notes do not count any more.
        """
        now_s = time.monotonic()
        if not is_idle:
            self._latest = None
            self._notes.clear()
        elif now_s >= self._next_s:
            self._next_s = now_s + self._period_s
            self._latest = self._judge_all(seen, now_s) if seen[0].rank == 0 else self._exchange(seen, now_s)
        return self._latest

    def _judge_all(self, seen: Sequence[RankState], now_s: float) -> Judgement | None:
        machines = [seen]
        for note in self._fresh_notes("ranks", now_s):
            with contextlib.suppress(TypeError):
                machines.append([RankState(**state) for state in note])
        made = self._judge([state for ranks in machines for state in ranks], sum(map(bool, machines)))
        self._store.post("judged", [now_s, *made])
        return made

    def _exchange(self, seen: Sequence[RankState], now_s: float) -> Judgement | None:
        self._store.post("ranks", [asdict(state) for state in seen])
        for note in self._fresh_notes("judged", now_s):
            with contextlib.suppress(TypeError, ValueError):
                _, verdict, text, all_wait = note
                return Judgement(Verdict(verdict), str(text), bool(all_wait))
        return None

    def _fresh_notes(self, topic: str, now_s: float) -> Iterator[Any]:
        """Yield what other machines have posted lately; anything, as other programs can write to the store."""
        for key, note in self._store.others(topic).items():
            # When the first one was posted is not known.
            before, changed_s = self._notes.get(key, (note, -math.inf))
            self._notes[key] = note, changed_s if note == before else now_s
            if now_s - self._notes[key][1] <= max(_STALE_S, 3 * self._period_s):
                yield note


# --- the stacks of ranks and of their loader processes ----------------------------------------------------------------

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_AT_REST = ("selectors.py", "connection.py", "queues.py", "threading.py")
# How long a process has to write its stacks, and how often to check; it writes all of them at once.
_STACKS_S = 0.5
_PAUSE_S = 0.02


def keep_stacks(run_dir: Path, pids: Mapping[int, int]) -> Path:
    """Write the stacks of each rank, and of its child processes, to files in a new folder; return the folder.

    Args:
        run_dir: The folder of the heartbeats.
        pids: The processes of the living ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix="lockstep-hang-"))
    for rank, pid in pids.items():
        # Processes that the rank has forked write to the file of the rank, so they are asked one after the other.
        for proc in set(process_tree(pid)):
            if text := _stacks_of(proc, rank_file(run_dir, STACKS, rank)):
                with contextlib.suppress(OSError):  # the disk is full: the report matters more
                    (folder / f"rank-{rank}{f'-process-{proc}' * (proc != pid)}.txt").write_text(text, errors="replace")
    return folder


def busy_workers(folder: Path, ranks: Iterable[int]) -> list[str]:
    """Return a sentence for each DataLoader worker of ``ranks`` that is not waiting for work.

    Args:
        folder: The folder that `keep_stacks` returned.
        ranks: The ranks whose workers are checked.
    """
    sentences = []
    for path in sorted(path for rank in ranks for path in folder.glob(f"rank-{rank}-process-*.txt")):
        text, (_, rank, _, pid) = path.read_text(errors="replace"), path.stem.split("-")
        frames = [(file, int(line), function) for file, line, function in _FRAME.findall(text)]
        if text == STOPPED or ("in _worker_loop" in text and not frames[0][0].endswith(_AT_REST)):
            file, line, function = rank_state.user_frame(frames)
            what = f"in {function} ({rank_state.where_of(file, line)})" if frames else "stopped by a signal (SIGSTOP)"
            sentences.append(f"process {pid} of rank {rank} is {what}")
    return sentences


def _stacks_of(pid: int, file: Path) -> str:
    """Return the stacks that a process writes to ``file`` at our signal; empty if it does not handle that."""
    if rank_state.process_state(pid)[0] == "T":
        return STOPPED
    with contextlib.suppress(OSError):  # it has just ended
        handled = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(errors="replace"))
        if handled and int(handled[1], 16) >> (STACKS_SIGNAL - 1) & 1:  # it would kill other processes
            file.write_text("")
            os.kill(pid, STACKS_SIGNAL)
            poll_until(lambda: file.stat().st_size > 0, _STACKS_S, _PAUSE_S)
            time.sleep(5 * _PAUSE_S)  # until it has written all
            return file.read_text(errors="replace")
    return ""


# --- the thread -------------------------------------------------------------------------------------------------------

_PERIOD_S = 0.5
# A rank is sampled after so many seconds at one place.
_SETTLED_S = 1.0
# After so many reports of a suspected hang, only a certain one is reported.
_NUM_REPORTS = 5
# How long a failed rank that others wait for may take to end: its exit handlers may have to send or write something.
_END_S = 10.0


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
        self._shared = None if self.store is None else SharedJudgement(self.store, self.num_nodes, self._judgement)
        self._over = threading.Event()
        self._samples: dict[int, deque[rank_state.Sample]] = {}
        self._failed: dict[int, float] = {}
        self._reported, self._num_reports = Verdict.FINE, 0
        self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        continues, last_error = self.patience_s > 0, ""
        while continues and not self._over.wait(_PERIOD_S):
            try:
                continues = self._check()
            except Exception as error:
                # Without this thread, a hanging job would hang forever.
                if (text := f"{type(error).__name__}: {error}") != last_error:
                    last_error = text
                    print(f"lockstep: the watchdog continues after an internal error: {text}", file=sys.stderr)

    def _check(self) -> bool:
        """Check all ranks once, and report a new verdict; return whether to continue watching."""
        if not (seen := self._read_ranks()):
            return True
        pids = {state.rank: state.pid for state in seen if state.pid}
        self.resources.update(pids)
        self._end_failed(seen)
        is_idle = any(state.idle_s >= self.patience_s / 2 for state in seen)
        judged = (self._shared and self._shared.update(seen, is_idle=is_idle)) or self._judgement(seen, 1)
        if judged.verdict is Verdict.FINE:
            self._reported = judged.verdict
        elif judged.verdict > self._reported and (judged.verdict is Verdict.HANGS or self._num_reports < _NUM_REPORTS):
            self._reported, self._num_reports = judged.verdict, self._num_reports + 1
            return self._report(seen, pids, judged)
        return True

    def _judgement(self, ranks: list[RankState], num_seen: int) -> Judgement:
        # All may wait for a rank of a machine whose states are not known.
        verdict = judge(ranks, self.patience_s, is_strict=self.is_strict, sees_all=num_seen >= self.num_nodes)
        text = report(ranks, self.patience_s, verdict, self.num_nodes, num_seen) if verdict else ""
        return Judgement(verdict, text, all(seen.operation for seen in ranks))

    def _report(self, seen: Sequence[RankState], pids: Mapping[int, int], judged: Judgement) -> bool:
        folder = keep_stacks(self.run_dir, pids)
        if self._over.is_set():  # The job has ended meanwhile.
            shutil.rmtree(folder, ignore_errors=True)
            return False
        awaited = {state.rank: state.pid for state in seen if state.pid and (judged.all_wait or not state.operation)}
        stacks = f"The Python stacks of {'all' if self.num_nodes == 1 else 'the'} ranks are in {folder}."
        processes = f"Their PIDs: {', '.join(f'{pid} (rank {rank})' for rank, pid in pids.items())}."
        text = "\n".join([judged.text, *busy_workers(folder, awaited), stacks, processes])
        return self.on_report(text, judged.verdict, awaited)

    def _end_failed(self, seen: Sequence[RankState]) -> None:
        """Kill ranks that failed some time ago and still run, if others wait for them.

        A rank has failed when its exception has left ``with lockstep.init()`` or the program.
        """
        now_s, limit_s = time.monotonic(), min(_END_S, self.patience_s / 2)
        failed = {state.pid: self._failed.get(state.pid, now_s) for state in seen if state.failure and state.pid}
        # With several machines, those that wait may be on others.
        if self.num_nodes > 1 or any(state.operation for state in seen):
            for pid in [pid for pid, since_s in failed.items() if now_s - since_s > limit_s]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._failed = failed

    def _read_ranks(self) -> list[RankState]:
        """Return the state of each rank of this machine."""
        states = []
        for rank, path in sorted(files_by_rank(self.run_dir, HEARTBEAT).items()):
            if not (heartbeat := read_object(path)):
                return []  # This rank may be the one that the others wait for; its next heartbeat comes soon.
            self.resources.devices[rank] = heartbeat["devices"]
            state, _ = rank_state.process_state(heartbeat["pid"])
            samples = self._samples.setdefault(rank, deque(maxlen=math.ceil(self.patience_s / _PERIOD_S) + 1))
            if time.monotonic() - heartbeat["moved_s"] < _SETTLED_S:
                samples.clear()
            else:
                samples.append(rank_state.sample(heartbeat["pid"], own_bytes=heartbeat["num_bytes"]))
            states.append(rank_state.state_of(rank, heartbeat, state, rank_state.sign_of_life(samples)))
        return states
