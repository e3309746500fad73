"""In a rank: a thread that writes twice a second where the main thread is, for the launcher's watchdog to read.

Standard library only, as every script would pay for more. The program's own calls cost nothing beyond a count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

STACKS_SIGNAL_OFFSET = 11
"""Above SIGRTMIN: the signal at which a rank writes its stacks; programs use SIGUSR1 and SIGUSR2 themselves."""

_PERIOD_S = 0.5
_NUM_FRAMES = 40
_COUNTED = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("send", "recv", "isend", "irecv", "all_gather_object", "broadcast_object_list", "monitored_barrier"),
)


class Beacon:
    """Writes the place of the main thread into ``run_dir/beacon-RANK``."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._file = os.open(os.path.join(run_dir, f"beacon-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._stacks = open(os.path.join(run_dir, f"stacks-{rank}"), "w")  # noqa: SIM115 - open as long as the process
        self._num_moves = 0
        self._last: tuple[Any, ...] = ()
        self._moved_at_ns = time.monotonic_ns()
        self._counts_collectives = self._counts_steps = False
        if hasattr(signal, "SIGRTMIN"):  # Linux
            faulthandler.register(signal.SIGRTMIN + STACKS_SIGNAL_OFFSET, self._stacks, all_threads=True)

    def start(self) -> None:
        """Start the thread; it ends with the process."""
        self.write()
        threading.Thread(target=self._run, name="lockstep-beacon", daemon=True).start()

    def write(self) -> None:
        """Write where the main thread is now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = _frames(frame)
        place = (self._num_moves, frame.f_lasti if frame else 0, frames)
        now_ns = time.monotonic_ns()
        if place != self._last:
            self._last, self._moved_at_ns = place, now_ns
        data = {"pid": os.getpid(), "beat_ns": now_ns, "moved_ns": self._moved_at_ns, "frames": frames}
        with contextlib.suppress(OSError):
            text = json.dumps(data).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))

    def _run(self) -> None:
        pid = os.getpid()
        while os.getpid() == pid:
            time.sleep(_PERIOD_S)
            self._count_what_has_come()
            self.write()

    def _count_what_has_come(self) -> None:
        """Count collectives and optimizer steps from now on, if torch has been imported by now."""
        c10d, dist = _complete("torch.distributed.distributed_c10d"), _complete("torch.distributed")
        if not self._counts_collectives and c10d is not None and dist is not None:
            self._counts_collectives = True
            for name in _COUNTED:
                if (function := getattr(c10d, name, None)) is not None:
                    counted = self._counted(function)
                    for module in (c10d, dist):
                        if getattr(module, name, None) is function:
                            setattr(module, name, counted)
        optim = _complete("torch.optim.optimizer")
        if not self._counts_steps and optim is not None and _complete("torch") is not None:
            self._counts_steps = True
            optim.register_optimizer_step_post_hook(self._stepped)

    def _counted(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._num_moves += 1
            return function(*args, **kwargs)

        return call

    def _stepped(self, *_: Any) -> None:
        self._num_moves += 1


def _complete(name: str) -> Any:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if spec is None or getattr(spec, "_initializing", False) else module


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of the innermost frames, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found
