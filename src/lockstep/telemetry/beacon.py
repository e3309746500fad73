"""In a rank: a thread that writes twice a second what the rank is doing, for the launcher's watchdog to read.

Standard library only, as every script would pay for more. What it knows it finds by looking, not by wrapping anything:
the main thread's Python frames, the calls that torch's process groups have counted, and the marks of progress.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from lockstep import progress
from lockstep.telemetry.device_memory import device_memory
from lockstep.telemetry.flight import awaited, calls_so_far
from lockstep.telemetry.imported import imported
from lockstep.telemetry.lookout import Lookout
from lockstep.telemetry.step_mark import make_mark
from lockstep.telemetry.torch_buckets import TorchBuckets

STACKS_SIGNAL_OFFSET = 11
"""Above SIGRTMIN: the signal at which a rank writes its stacks; programs use SIGUSR1 and SIGUSR2 themselves."""

_PERIOD_S = 0.5
_MEMORY_PERIOD_S = 2.0
_NUM_FRAMES = 120
_RECORDED_AFTER = 0.5
"""After this part of the patience at one place, a rank asks torch once which collective was the last."""


class Beacon:
    """Writes what the main thread does into ``run_dir/beacon-RANK``.

    Args:
        run_dir: The run's folder.
        rank: Of this process.
        patience_s: After how long the launcher asks what the rank waits for.
    """

    def __init__(self, run_dir: str, rank: int, *, patience_s: float) -> None:
        self._file = os.open(os.path.join(run_dir, f"beacon-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._stacks = open(os.path.join(run_dir, f"stacks-{rank}"), "w")  # noqa: SIM115 - open as long as the process
        progress.now.mark = make_mark(run_dir, rank)
        self._num_bytes = 0
        self._recorded_after_ns = _RECORDED_AFTER * patience_s * 1e9
        self._last: tuple[Any, ...] = ()
        self._moved_at_ns = time.monotonic_ns()
        self._counts_steps = False
        self._buckets = TorchBuckets()
        self._devices: list[tuple[str, int, int, int]] = []
        self._collective: str | None = None
        if hasattr(signal, "SIGRTMIN"):  # Linux
            faulthandler.register(signal.SIGRTMIN + STACKS_SIGNAL_OFFSET, self._stacks, all_threads=True)

    def start(self) -> None:
        """Start the thread, and one that looks for what should be known sooner; they end with the process."""
        progress.now.wants_pace = True
        self.write()
        threading.Thread(target=self._run, name="lockstep-beacon", daemon=True).start()
        Lookout().start()

    def write(self) -> None:
        """Write what this rank does now."""
        ident = threading.main_thread().ident or 0
        frame = sys._current_frames().get(ident)
        frames, now, calls = _frames(frame), progress.now, _num_calls()
        place = (now.num_steps, calls, now.step, now.phase, frame.f_lasti if frame else 0, frames)
        now_ns = time.monotonic_ns()
        if place != self._last:
            self._last, self._moved_at_ns, self._collective = place, now_ns, None
        elif self._collective is None and now_ns - self._moved_at_ns > self._recorded_after_ns:
            self._collective = self._awaited()
        bucket = now.bucket
        data = {
            "pid": os.getpid(),
            "beat_ns": now_ns,
            "moved_ns": self._moved_at_ns,
            "frames": frames,
            "step": now.step,
            "phase": now.phase,
            "num_steps": now.num_steps,
            "num_calls": calls,
            "bucket": "" if bucket is None else f"bucket {bucket[0]} ({progress.name_of_bucket(bucket[1])})",
            "collective": self._collective or "",
            "handles": _handled(ident),
            "failure": now.failure,
            "held_up": now.held_up,
            "uses_gpu": _uses_gpu(),
            "pace": now.pace,
            "devices": self._devices,
            "num_bytes": self._num_bytes,
        }
        with contextlib.suppress(OSError):
            text = json.dumps(data).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
            self._num_bytes += len(text)

    def _run(self) -> None:
        pid, looked_at = os.getpid(), 0.0
        while os.getpid() == pid:
            time.sleep(_PERIOD_S)
            self._count_steps()
            self._buckets.look(progress.now.num_steps)
            if time.monotonic() - looked_at >= _MEMORY_PERIOD_S:
                self._devices, looked_at = device_memory(), time.monotonic()
            self.write()

    def _count_steps(self) -> None:
        """Count optimizer steps from now on, if torch has been imported by now."""
        optim = imported("torch.optim.optimizer")
        if not self._counts_steps and optim is not None and imported("torch") is not None:
            self._counts_steps = True
            optim.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        progress.now.num_steps += 1

    def _awaited(self) -> str:
        """Return the collective that this rank waits in, by torch's own record of them, if it keeps one."""
        calls = calls_so_far()
        if (place := awaited(calls)) is None:
            return ""
        bucket = self._buckets.name(calls, place)
        return f"{calls[place].name} of {bucket and f'{bucket}, '}{calls[place].numel} elements"


def _num_calls() -> int:
    """Return how often this process has called collectives, as far as its process groups count them."""
    c10d, total = imported("torch.distributed.distributed_c10d"), progress.now.num_calls
    groups = getattr(getattr(c10d, "_world", None), "pg_map", ())
    with contextlib.suppress(RuntimeError):  # another thread makes or destroys one just now
        for group in list(groups):
            with contextlib.suppress(Exception):  # groups written in Python need not count
                total += group._get_sequence_number_for_group()
    return total


def _handled(ident: int) -> str:
    """Return the exception that the main thread is handling, in an ``except`` or ``finally`` block."""
    if sys.version_info >= (3, 12):
        error = sys._current_exceptions().get(ident)
    else:
        error = sys._current_exceptions().get(ident, (None, None, None))[1]
    if not isinstance(error, Exception):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}{place}"


def _uses_gpu() -> bool:
    cuda = imported("torch.cuda")
    return bool(getattr(cuda, "_initialized", False))


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of the innermost frames, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found
