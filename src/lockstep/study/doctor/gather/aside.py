"""Run a user's code in a process of its own, take what it tells in time, and end it in any case."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol


class Tell(Protocol):
    """Hands a value over to the process that asked."""

    def __call__(self, value: Any) -> None:
        """Send ``value``, which can be pickled."""


class Silent(Exception):
    """Nothing came in time, or the process ended without a word; the message says which."""


class Aside:
    """A process that runs ``function(tell, *args)``; forked, so that it has all modules at once.

    A context manager: leaving the block ends the process and all that it has started. What it prints goes to stderr.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe(duplex=False)
        # Not a daemon: those may have no children, and a loader of the user's may want some.
        self._process = context.Process(target=_run, args=(theirs, function, args), name="lockstep-doctor")
        with warnings.catch_warnings():
            # Python warns that a fork with threads may hang; this one is ended when its time is up.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def receive(self, seconds: float) -> Any:
        """Return the next value. Blocks at most ``seconds``.

        Raises:
            Silent: There is none.
        """
        if not self._ours.poll(max(0.0, seconds)):
            raise Silent("it took too long")
        try:
            return self._ours.recv()
        except EOFError:
            self._process.join(1.0)
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise Silent(f"its process ended with {how}") from None

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pid = self._process.pid
        assert pid is not None
        # The process made a group of its own; right after the fork it has not yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._ours.close()


def _run(ours: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked ends this one
    sys.stdout = sys.stderr
    os.dup2(2, 1)  # also for what is not Python
    function(ours.send, *args)
    ours.close()
