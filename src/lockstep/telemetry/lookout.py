"""In a rank: a thread that looks five times a second for what should be known soon.

That is an exception that will end the program, but is held up in a ``finally``; and connections to other machines that
a new process group has made, so that the kernel probes them: see `lockstep.comm.link`. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from lockstep import progress
from lockstep.comm.link import probe_connections
from lockstep.telemetry.imported import imported
from lockstep.telemetry.uncaught import ends_program

_PERIOD_S = 0.2


class Lookout:
    """Looks at the main thread and at torch's process groups, from a thread of its own that ends with the process."""

    def __init__(self) -> None:
        self._num_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._groups: set[int] = set()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="lockstep-lookout", daemon=True).start()

    def _run(self) -> None:
        pid = os.getpid()
        while os.getpid() == pid:
            time.sleep(_PERIOD_S)
            look_for_error()
            if self._num_machines > 1:
                self._look_for_groups()

    def _look_for_groups(self) -> None:
        world = getattr(imported("torch.distributed.distributed_c10d"), "_world", None)
        with contextlib.suppress(RuntimeError):  # another thread makes or destroys one just now
            groups = {id(group) for group in getattr(world, "pg_map", ())}
            if groups - self._groups:
                probe_connections()
            self._groups = groups


def look_for_error() -> None:
    """Tell of an exception that the main thread has in hand, if nobody will catch it."""
    ident = threading.main_thread().ident or 0
    error, now = _handled(ident), progress.now
    if error is None:
        now.held_up = None
        return
    is_known = now.held_up is not None or now.failure is not None
    if not is_known and ends_program(error, sys._current_frames().get(ident), passing=now.passing):
        now.held_up = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if now.on_failure is not None:
            now.on_failure(error)


def _handled(ident: int) -> Exception | None:
    """Return the exception that a thread is handling, in an ``except`` or ``finally`` block."""
    found = sys._current_exceptions().get(ident)
    error = found[1] if isinstance(found, tuple) else found
    return error if isinstance(error, Exception) else None
