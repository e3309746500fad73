"""Signs of life of a rank whose main thread stands still, from /proc: its processor time, its input and output ..."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.2
"""The share of a core above which a rank is taken to compute."""

WAKES_UP = "it wakes up again and again"
"""Somebody who looks now and then whether a file has come does so; and so does who waits in our shared memory."""

_STIRS = 0.02
"""The share of a core that idle threads of torch and its backends stay well below."""
_MIN_BYTES = 32 * 1024
_WAKEUPS_PER_S = 0.5
"""DataLoader's own waiting wakes up every five seconds."""
_MOST = 0.5
"""The part of the samples in which a thread is in one state, for that to be what it is in."""

HAS_PROC = os.path.isdir("/proc/self")


@dataclass(frozen=True)
class Sample:
    """What a rank and the processes that it has started had done at one moment.

    Attributes:
        at_s: When, on the monotonic clock.
        cpu_s: Seconds of processor time.
        num_bytes: Bytes that went through read and write.
        num_wakeups: How often main threads went to sleep and were woken.
        pids: The processes.
        is_in_disk: Whether a main thread is held by the kernel for a disk or a network file system.
        is_ready: Whether a main thread computes or would, if the machine gave it the processor.
    """

    at_s: float
    cpu_s: float
    num_bytes: int
    num_wakeups: int
    pids: frozenset[int]
    is_in_disk: bool = False
    is_ready: bool = False


class Life:
    """The samples of one rank over the last ``window_s``."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Add one; forget what lies further back than the window."""
        self._samples.append(sample)
        while sample.at_s - self._samples[0].at_s > self._window_s:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget all: the rank has moved."""
        self._samples.clear()

    @property
    def is_busy(self) -> bool:
        """Whether it computes, or would on a machine that has less to do."""
        return self._share() > BUSY or self._part_of("is_ready") > _MOST

    def _part_of(self, name: str) -> float:
        """Return in which part of the samples something was so; 0 where there are not two of them."""
        if len(self._samples) < 2:
            return 0.0
        return sum(1 for each in self._samples if getattr(each, name)) / len(self._samples)

    def _share(self) -> float:
        """Return the share of a core that it used since the first sample."""
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return (last.cpu_s - first.cpu_s) / max(last.at_s - first.at_s, 1e-9)

    def signs(self) -> str:
        """Return what says that it may be moving, as a sentence; empty if nothing does."""
        if len(self._samples) < 2:
            return ""
        first, last = self._samples[0], self._samples[-1]
        if first.pids != last.pids:
            return "it starts programs or sees them end"
        if last.num_bytes - first.num_bytes > _MIN_BYTES:
            return "it reads or writes"
        if self._part_of("is_in_disk") > _MOST:
            return "it waits for a disk or a network file system"
        if last.num_wakeups - first.num_wakeups > 3 + _WAKEUPS_PER_S * (last.at_s - first.at_s):
            return WAKES_UP
        return "it uses the processor a little" if self._share() > _STIRS else ""


def state_of(pid: int) -> tuple[str, float]:
    """Return the state of a process, and its seconds of processor time; an empty state if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        # Not Linux: taken to compute, which only makes the watchdog more patient.
        return ("", 0.0) if HAS_PROC else ("R", time.monotonic())
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sample(pid: int, *, own_bytes: int) -> Sample:
    """Look at a rank and what it has started.

    Args:
        pid: The rank's process.
        own_bytes: What its beacon has written, which is no sign of life.
    """
    at_s = time.monotonic()
    pids = frozenset(family(pid))
    cpu_s, num_bytes, num_wakeups, is_in_disk, is_ready = 0.0, -own_bytes, 0, False, False
    for each in pids:
        state, used_s = state_of(each)
        cpu_s += used_s
        is_in_disk |= state == "D"
        is_ready |= state == "R"
        num_bytes += _bytes(each)
        num_wakeups += _wakeups(each)
    return Sample(at_s, cpu_s, num_bytes, num_wakeups, pids, is_in_disk, is_ready)


def family(pid: int, *, of_all_threads: bool = True) -> Iterator[int]:
    """Yield a process and all that descend from it, or from main threads only, which is quicker to find out."""
    yield pid
    task = Path(f"/proc/{pid}/task")
    for path in task.glob("*/children") if of_all_threads else [task / str(pid) / "children"]:
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                yield from family(int(child), of_all_threads=of_all_threads)


def _bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _wakeups(pid: int) -> int:
    """Return how often the main thread has let go of the processor of its own accord."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return int(line.partition(":")[2])
    return 0
