"""Writing beside the training: one job at a time, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Runs one job at a time in a thread, and keeps what went wrong in one until somebody asks.

    The thread does not keep the process alive: who ends it without `wait` gives up the job.

    Attributes:
        error: What the last job raised, or None.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._is_running = False
        self._afterwards: Callable[[], None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Start a job, which `wait` has to be called before."""
        assert self._thread is None, "one at a time"
        self._is_running = True
        self._thread = threading.Thread(target=self._run, args=[job], name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job in this thread; what it raises is kept all the same."""
        self._is_running = True
        self._run(job)

    def wait(self, timeout_s: float) -> bool:
        """Block until no job is running, at most so long; return whether none is."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def leave(self, afterwards: Callable[[], None]) -> None:
        """Have ``afterwards`` called once no job is running, be that now or later, by the thread. No job follows."""
        with self._guard:
            if self._is_running:
                self._afterwards = afterwards
                return
        afterwards()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # told to all ranks by whoever looks at it
            self.error = error
        finally:
            with self._guard:
                self._is_running, afterwards = False, self._afterwards
            if afterwards is not None:
                afterwards()
