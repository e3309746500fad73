"""The state of a rank as the launcher sees it: the place of its main thread, what that waits in, activity by /proc.

Uses only the standard library, as the launcher and the heartbeat of each rank import it.
"""

import contextlib
import linecache
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.base.activity import CLOSE, DEVICE
from lockstep.base.env import process_tree
from lockstep.base.rank_files import Progress

# --- activity of a rank whose main thread stays at one place ----------------------------------------------------------

# What a rank does although its main thread stays at one place; others, which mean that it may only be slow, are below.
ENDED, STOPPED, COMPUTES = "it has ended", "it is stopped by a signal", "it computes"
DEBUGGED = "it waits for a person at a debugger"
# As a process does that polls for a file, or that waits in our shared memory.
WAKES_UP = "it wakes up repeatedly"

# A rank that uses more than this share of a core computes; idle threads of torch and its backends use far less than
# the second one.
_BUSY, _STIRS = 0.2, 0.02
_MIN_BYTES = 32 * 1024
# A DataLoader that waits wakes up every five seconds.
_WAKEUPS_PER_S = 0.5


class Sample(NamedTuple):
    """What a rank and its child processes had done at one moment.

    Attributes:
        at_s: When, on the monotonic clock.
        cpu_s: Seconds of processor time.
        num_bytes: Bytes that they read and wrote.
        num_wakeups: How often main threads slept and were woken.
        pids: The processes.
        states: Of their main threads, as in /proc: ``R`` computes or waits for a core, ``D`` waits in the kernel for a
            disk or a network file system.
    """

    at_s: float
    cpu_s: float
    num_bytes: int
    num_wakeups: int
    pids: frozenset[int]
    states: str


def sign_of_life(samples: Sequence[Sample]) -> str:
    """Return what a rank did since the first of ``samples``, as a sentence; empty if nothing."""
    if len(samples) < 2:
        return ""
    first, last = samples[0], samples[-1]
    seconds = last.at_s - first.at_s
    core_share = (last.cpu_s - first.cpu_s) / max(seconds, 1e-9)
    num_seen = Counter(state for sample in samples for state in set(sample.states))
    signs = {
        COMPUTES: core_share > _BUSY or 2 * num_seen["R"] > len(samples),
        "its child processes start or end": first.pids != last.pids,
        "it reads or writes": last.num_bytes - first.num_bytes > _MIN_BYTES,
        "it waits for a disk or a network file system": 2 * num_seen["D"] > len(samples),
        WAKES_UP: last.num_wakeups - first.num_wakeups > 3 + _WAKEUPS_PER_S * seconds,
        "it uses the processor a little": core_share > _STIRS,
    }
    return next((sign for sign, is_so in signs.items() if is_so), "")


def process_state(pid: int) -> tuple[str, float]:
    """Return the state of a process, and its seconds of processor time.

    The state is a letter: ``T`` if it is stopped by a signal such as SIGSTOP, or by a debugger. It is empty if the
    process has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0].strip("XZ").upper(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sample(pid: int, *, own_bytes: int) -> Sample:
    """Return a sample of a rank and its child processes.

    Args:
        pid: The process of the rank.
        own_bytes: Bytes written by its heartbeat, which do not count.
    """
    at_s, pids = time.monotonic(), frozenset(process_tree(pid))
    states, used_s = zip(*map(process_state, pids), strict=True)
    num_bytes = sum(_counted(f"/proc/{pid}/io", "rchar|wchar") for pid in pids) - own_bytes
    # Of main threads only.
    num_wakeups = sum(_counted(f"/proc/{pid}/task/{pid}/status", "voluntary_ctxt_switches") for pid in pids)
    return Sample(at_s, sum(used_s), num_bytes, num_wakeups, pids, "".join(states))


def _counted(path: str, names: str) -> int:
    """Return the sum of some numbers in a file of ``name: number`` lines; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        return sum(map(int, re.findall(rb"^(?:%b):\s*(\d+)$" % names.encode(), Path(path).read_bytes(), re.MULTILINE)))
    return 0


# --- the state by its heartbeat ---------------------------------------------------------------------------------------

# File, line and function, innermost first.
Frames = Sequence[tuple[str, int, str]]

# The operation of `RankState` in which the engine of torch waits.
BACKWARD = "backward (gradient exchange)"

# There are two heartbeats per second: after this time without one, no Python thread of the rank runs.
SILENT_S = 2.0

_STDLIB = os.path.dirname(os.__file__)
_ABOVE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PACKAGE = f"{_ABOVE}lockstep{os.sep}"
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", f"{os.sep}lockstep{os.sep}launcher{os.sep}")
# Parts of this package that are named if no line of the script is on the stack.
_KNOWN = (f"{_PACKAGE}train{os.sep}", f"{_PACKAGE}data{os.sep}", f"{_PACKAGE}parallel{os.sep}")
# Files with functions that a script calls; our own collectives mark their waits, see `lockstep.base.activity.waiting`.
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "lockstep/comm/world.py")
_NOT_CALLED = ("_", "wrapper")
_WAITS = (".wait(", ".synchronize(")
_READS = (".item(", ".cpu(", ".tolist(", ".numpy(")
_GPU_WAITS = (*_WAITS, *_READS, "float(", "bool(", "int(", ".backward(")
_DEBUGGERS = ("bdb.py", "pdb.py", "code.py", "pydevd.py", "pydevd_frame.py")
# Of sockets, asyncio, and programs that the rank has started.
_OUTSIDE = ("socket.py", "ssl.py", "base_events.py", "subprocess.py")


@dataclass(frozen=True)
class RankState(Progress):
    """The state of a rank as the launcher of its machine sees it.

    Attributes:
        idle_s: Seconds for which its main thread has been at the same place, without a step or a collective.
        life: What it and its child processes did in that time, such as ``it reads or writes``; empty if nothing.
        operation: The operation in which it waits for others, such as ``all_reduce``; empty if it does not wait.
        place: Where it is, as a predicate such as ``waits in all_reduce (train.py:7)``.
        pid: Its process, if that lives.
        failure: The exception that ended its part in the job, if its process still runs.
        uses_gpu: Whether it uses an accelerator.
    """

    rank: int
    idle_s: float = 0.0
    life: str = ""
    operation: str = ""
    place: str = ""
    pid: int = 0
    failure: str = ""
    uses_gpu: bool = False


def state_of(rank: int, heartbeat: Mapping[str, Any], process_state: str, life: str = "") -> RankState:
    """Return the state of a rank.

    Args:
        rank: Its number.
        heartbeat: What it wrote last; see `Heartbeat.write`.
        process_state: Of its process; see `process_state`.
        life: What it does by `sign_of_life`.
    """
    now_s, frames = time.monotonic(), heartbeat["frames"]
    idle_s, is_silent = now_s - heartbeat["moved_s"], now_s - heartbeat["beat_s"] > SILENT_S
    life = life or waits_outside(frames)
    if process_state == "T":
        life = STOPPED
    elif not process_state or heartbeat["collective"] == CLOSE:
        life, idle_s = ENDED, 0.0
    elif is_debugged(frames):
        life = DEBUGGED
    name = "" if is_silent or life in (ENDED, STOPPED) else operation(heartbeat, is_busy=life == COMPUTES)
    fields = {name: heartbeat[name] for name in ("step", "phase", "num_steps", "failure", "uses_gpu")}
    pid = heartbeat["pid"] if process_state else 0
    return RankState(rank, idle_s, life, name, place(heartbeat, life, name, is_silent=is_silent), pid, **fields)


def operation(heartbeat: Mapping[str, Any], *, is_busy: bool) -> str:
    """Return the operation in which a rank waits for others, such as ``all_reduce``; empty if it does not wait."""
    frames, uses_gpu = heartbeat["frames"], heartbeat["uses_gpu"]
    calls = [at[2] for at in frames if at[0].endswith(_COLLECTIVE_FILES) and not at[2].startswith(_NOT_CALLED)]
    if heartbeat["collective"] or calls or not frames:
        return heartbeat["collective"] or "".join(calls[-1:])
    # The engines of torch wait in native code, where only the line of the script tells what it waits for.
    file, _, _ = user_frame(frames)
    inner, line, function = frames[0]
    text = linecache.getline(inner, line) if inner == file or inner.startswith(_PACKAGE) else ""
    if function == "_engine_run_backward" and (not is_busy or uses_gpu):
        return BACKWARD
    # As a rule, the host spins while it waits for the GPU. An idle line of the script may do something else.
    marks = _GPU_WAITS if is_busy or inner.startswith(_PACKAGE) else _READS
    if uses_gpu and ((inner != file and function == "synchronize") or any(mark in text for mark in marks)):
        return DEVICE
    return next((mark[1:-1] for mark in _WAITS if mark in text and inner == file and not is_busy), "")


def is_debugged(frames: Frames) -> bool:
    """Return whether a rank waits for a person, in a debugger or in ``input()``."""
    is_asked = bool(frames) and "input(" in linecache.getline(*frames[0][:2])
    return is_asked or any(os.path.basename(file) in _DEBUGGERS for file, _, _ in frames)


def waits_outside(frames: Frames) -> str:
    """Return what outside of the job a rank waits for, by its frames; empty if nothing."""
    # Only the innermost frames, as a whole program may run within asyncio.
    modules = [name for file, _, _ in frames[:4] if (name := os.path.basename(file)) in _OUTSIDE]
    return f"it waits for the network or another program, in {modules[0]} of Python" if modules else ""


def where_of(file: str, line: int) -> str:
    """Return a short form of file and line."""
    return f"{file.removeprefix(_ABOVE) if file.startswith(_PACKAGE) else os.path.basename(file)}:{line}"


def user_frame(frames: Frames) -> tuple[str, int, str]:
    """Return the innermost frame that is neither of Python nor of an installed package."""
    foreign = (_PACKAGE, _STDLIB, sys.prefix)
    users = [at for at in frames if not (at[0].startswith(foreign) or any(part in at[0] for part in _LIBRARIES))]
    libraries = [at for at in frames if at[0].startswith(_KNOWN)]
    file, line, function = [*users, *libraries, *frames, ("", 0, "")][0]
    return file, line, function


def place(heartbeat: Mapping[str, Any], life: str, name: str, *, is_silent: bool) -> str:
    """Return where a rank is, as a predicate such as ``waits in all_reduce (train.py:7)``; ``name``: its operation."""
    frames = heartbeat["frames"]
    file, line, function = user_frame(frames)
    where = where_of(file, line)
    if life == ENDED:
        return "ended normally"  # a rank that failed would have ended the job
    if life == STOPPED:
        return f"was stopped by a signal (SIGSTOP), last seen at {where}"
    if is_silent:
        return f"does not respond: native code holds the interpreter lock, last seen at {where}"
    if heartbeat["failure"]:
        return f"has failed ({heartbeat['failure']}) but still runs, and is in {function} ({where})"
    if name:
        # The program does not know which collective its device, or the engine of torch, is in.
        call = f": {heartbeat['recorded_call']}" if heartbeat["recorded_call"] and name in (DEVICE, BACKWARD) else ""
        return f"waits {'for its device' if name == DEVICE else f'in {name}'}{call} ({where})"
    if any(frame[0].endswith("torch/utils/data/dataloader.py") and frame[2] == "__next__" for frame in frames):
        function = "DataLoader.__next__"
    return f"is in {function} ({where})"
