"""The state of a rank as the launcher sees it: the place of its main thread, what that waits in, activity by /proc.

Uses only the standard library, as the launcher and the heartbeat of each rank import it.
"""

import contextlib
import linecache
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.activity import DEVICE

# --- activity of a rank whose main thread stays at one place ----------------------------------------------------------

# States of a process that is stopped by a signal such as SIGSTOP, or by a debugger.
STOPPED = ("T", "t")

# A rank that uses more than this share of a core computes.
BUSY = 0.2

# As a process does that polls for a file, or that waits in our shared memory.
WAKES_UP = "it wakes up repeatedly"

# Idle threads of torch and its backends use far less than this share of a core.
_STIRS = 0.02
_MIN_BYTES = 32 * 1024
# A DataLoader that waits wakes up every five seconds.
_WAKEUPS_PER_S = 0.5


@dataclass(frozen=True)
class Sample:
    """What a rank and its child processes had done at one moment.

    Attributes:
        at_s: When, on the monotonic clock.
        cpu_s: Seconds of processor time.
        num_bytes: Bytes that they read and wrote.
        num_wakeups: How often main threads slept and were woken.
        pids: The processes.
        is_in_disk: Whether a main thread waits in the kernel for a disk or a network file system.
        is_ready: Whether a main thread computes, or waits for a core.
    """

    at_s: float
    cpu_s: float
    num_bytes: int
    num_wakeups: int
    pids: frozenset[int]
    is_in_disk: bool = False
    is_ready: bool = False


@dataclass
class Liveness:
    """The samples of one rank over the last ``window_s``; to be cleared when the rank has moved."""

    window_s: float
    samples: deque[Sample] = field(default_factory=deque)

    def add(self, sample: Sample) -> None:
        """Add a sample; drop those older than the window."""
        self.samples.append(sample)
        while sample.at_s - self.samples[0].at_s > self.window_s:
            self.samples.popleft()

    @property
    def is_busy(self) -> bool:
        """Whether it computes, or waits for a core."""
        return len(self.samples) > 1 and (self._core_share() > BUSY or self._is_mostly("is_ready"))

    def signs(self) -> str:
        """Return a sign that the rank may be active, as a sentence; empty if there is none."""
        if len(self.samples) < 2:
            return ""
        first, last = self.samples[0], self.samples[-1]
        signs = {
            "its child processes start or end": first.pids != last.pids,
            "it reads or writes": last.num_bytes - first.num_bytes > _MIN_BYTES,
            "it waits for a disk or a network file system": self._is_mostly("is_in_disk"),
            WAKES_UP: last.num_wakeups - first.num_wakeups > 3 + _WAKEUPS_PER_S * (last.at_s - first.at_s),
            "it uses the processor a little": self._core_share() > _STIRS,
        }
        return next((sign for sign, is_so in signs.items() if is_so), "")

    def _is_mostly(self, name: str) -> bool:
        """Return whether most samples have the attribute ``name``."""
        return 2 * sum(bool(getattr(each, name)) for each in self.samples) > len(self.samples)

    def _core_share(self) -> float:
        """Return the share of a core that it used since the first sample."""
        first, last = self.samples[0], self.samples[-1]
        return (last.cpu_s - first.cpu_s) / max(last.at_s - first.at_s, 1e-9)


def process_state(pid: int) -> tuple[str, float]:
    """Return the state of a process, and its seconds of processor time; the state is empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0].strip("XZ"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sample(pid: int, *, own_bytes: int) -> Sample:
    """Return a sample of a rank and its child processes.

    Args:
        pid: The process of the rank.
        own_bytes: Bytes written by its heartbeat, which do not count.
    """
    at_s, pids = time.monotonic(), frozenset(process_tree(pid))
    states, used_s = zip(*map(process_state, pids), strict=True)
    num_bytes = sum(_counted(f"/proc/{each}/io", "rchar|wchar") for each in pids) - own_bytes
    # Of main threads only.
    num_wakeups = sum(_counted(f"/proc/{each}/task/{each}/status", "voluntary_ctxt_switches") for each in pids)
    return Sample(at_s, sum(used_s), num_bytes, num_wakeups, pids, "D" in states, "R" in states)


def process_tree(pid: int, *, of_all_threads: bool = True) -> Iterator[int]:
    """Yield a process and its descendants; those started by main threads only are found faster."""
    yield pid
    task = Path(f"/proc/{pid}/task")
    for path in task.glob("*/children") if of_all_threads else [task / str(pid) / "children"]:
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                yield from process_tree(int(child), of_all_threads=of_all_threads)


def _counted(path: str, names: str) -> int:
    """Return the sum of some numbers in a file of ``name: number`` lines; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        return sum(map(int, re.findall(rf"^(?:{names}):\s*(\d+)$", Path(path).read_text(), re.MULTILINE)))
    return 0


def format_bytes(num_bytes: float) -> str:
    """Return a size in GiB or MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


# --- the state by its heartbeat ---------------------------------------------------------------------------------------

# File, line and function, innermost first.
Frames = Sequence[tuple[str, int, str]]

# There are two heartbeats per second: after this time without one, no Python thread of the rank runs.
SILENT_S = 2.0

_STDLIB = os.path.dirname(os.__file__)
_ABOVE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PACKAGE = f"{_ABOVE}lockstep{os.sep}"
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", f"{os.sep}lockstep{os.sep}launcher{os.sep}")
# Parts of this package that are named if no line of the script is on the stack.
_KNOWN = (f"{_PACKAGE}train{os.sep}", f"{_PACKAGE}data{os.sep}", f"{_PACKAGE}parallel{os.sep}")
# Files with functions that a script calls; our own collectives mark their waits, see `lockstep.activity.waiting`.
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "lockstep/comm/world.py")
_NOT_CALLED = ("_", "wrapper")
_WAITS = (".wait(", ".synchronize(")
_READS = (".item(", ".cpu(", ".tolist(", ".numpy(")
_GPU_WAITS = (*_WAITS, *_READS, "float(", "bool(", "int(", ".backward(")
_DEBUGGERS = ("bdb.py", "pdb.py", "code.py", "pydevd.py", "pydevd_frame.py")
# Of sockets, asyncio, and programs that the rank has started.
_OUTSIDE = ("socket.py", "ssl.py", "base_events.py", "subprocess.py")


@dataclass(frozen=True)
class RankState:
    """The state of a rank as the launcher sees it.

    Attributes:
        frames: File, line and function of the main thread, innermost first.
        still_s: Seconds for which its main thread has been at the same place, without a step or a collective.
        silent_s: Seconds since its last heartbeat.
        is_busy: Whether it, or a child process, used the processor in that time.
        life: A sign that it may be active although its main thread is not, such as ``it reads or writes``.
        is_stopped: Whether it is stopped by a signal such as SIGSTOP.
        has_left: Whether it has ended.
        step: The step of ``fit``, counted from 0.
        phase: The phase of that step.
        num_steps: Number of optimizer steps done.
        has_trained: Whether it has done an optimizer step or a collective.
        bucket: The bucket that it waits for, with the names of its parameters.
        collective: The collective of ours in which its main thread waits.
        recorded_call: The first collective in torch's record that has not completed, otherwise the last.
        failure: The exception that ended its part in the job, if its process still runs.
        uses_gpu: Whether it has a CUDA context.
    """

    rank: int
    frames: Frames = ()
    still_s: float = 0.0
    silent_s: float = 0.0
    is_busy: bool = False
    life: str = ""
    is_stopped: bool = False
    has_left: bool = False
    step: int | None = None
    phase: str = ""
    num_steps: int = 0
    has_trained: bool = False
    bucket: str = ""
    collective: str = ""
    recorded_call: str = ""
    failure: str = ""
    uses_gpu: bool = False

    @property
    def idle_s(self) -> float:
        """Seconds for which its place has not changed."""
        return max(self.still_s, self.silent_s)


def operation(seen: RankState) -> str | None:
    """Return the operation in which a rank waits for others, such as ``all_reduce``; ``None`` if it does not."""
    if seen.has_left or seen.is_stopped or seen.silent_s > SILENT_S:
        return None
    if seen.bucket or seen.collective:
        return f"all_reduce of {seen.bucket}" if seen.bucket else seen.collective
    calls = [at[2] for at in seen.frames if at[0].endswith(_COLLECTIVE_FILES) and not at[2].startswith(_NOT_CALLED)]
    if calls or not seen.frames:
        return calls[-1] if calls else None
    # The engines of torch wait in native code, where only the line of the script tells what it waits for.
    file, _, _ = user_frame(seen.frames)
    inner, line, function = seen.frames[0]
    text = linecache.getline(inner, line) if inner == file or inner.startswith(_PACKAGE) else ""
    # As a rule, the host spins while it waits for the GPU. An idle line of the script may do something else.
    marks = _GPU_WAITS if seen.is_busy or inner.startswith(_PACKAGE) else _READS
    if function == "_engine_run_backward" and (not seen.is_busy or seen.uses_gpu):
        what = f": {seen.recorded_call}" if seen.recorded_call else ""
        return f"backward (gradient exchange{what})"
    if seen.uses_gpu and ((inner != file and function == "synchronize") or any(mark in text for mark in marks)):
        return DEVICE
    if inner != file or seen.is_busy:
        return None
    return next((mark[1:-1] for mark in _WAITS if mark in text), None)


def is_debugged(seen: RankState) -> bool:
    """Return whether the rank waits for a person, in a debugger or in ``input()``."""
    if seen.frames and "input(" in linecache.getline(*seen.frames[0][:2]):
        return True
    return any(os.path.basename(file) in _DEBUGGERS for file, _, _ in seen.frames)


def waits_outside(frames: Frames) -> str:
    """Return what outside of the job a rank waits for, by its frames; empty if nothing."""
    # Only the innermost frames, as a whole program may run within asyncio.
    found = [name for file, _, _ in frames[:4] if (name := os.path.basename(file)) in _OUTSIDE]
    return f"it waits for the network or another program, in {found[0]} of Python" if found else ""


def where_of(file: str, line: int) -> str:
    """Return a short form of file and line."""
    if not file:
        return "an unknown place"
    return f"{file.removeprefix(_ABOVE) if file.startswith(_PACKAGE) else os.path.basename(file)}:{line}"


def user_frame(frames: Frames) -> tuple[str, int, str]:
    """Return the innermost frame that is neither of Python nor of an installed package."""
    foreign = (_PACKAGE, _STDLIB, sys.prefix)
    users = [at for at in frames if not (at[0].startswith(foreign) or any(part in at[0] for part in _LIBRARIES))]
    known = [at for at in frames if at[0].startswith(_KNOWN)]
    file, line, function = [*users, *known, *frames, ("", 0, "")][0]
    return file, line, function


def place(seen: RankState) -> str:
    """Return where a rank is, as a predicate such as ``waits in all_reduce (train.py:7)``."""
    if seen.has_left:
        return "ended normally"  # a rank that failed would have ended the job
    file, line, function = user_frame(seen.frames)
    where = where_of(file, line)
    if seen.is_stopped:
        return f"was stopped by a signal (SIGSTOP), last seen at {where}"
    if seen.silent_s > SILENT_S:
        return f"does not respond: native code holds the interpreter lock, last seen at {where}"
    if seen.failure:
        return f"has failed ({seen.failure}) but still runs, and is in {function} ({where})"
    if name := operation(seen):
        return f"waits {'for its device' if name == DEVICE else f'in {name}'} ({where})"
    if any(each[0].endswith("torch/utils/data/dataloader.py") and each[2] == "__next__" for each in seen.frames):
        function = "DataLoader.__next__"
    return f"is in {function} ({where})"
