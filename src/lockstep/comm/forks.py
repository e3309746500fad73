"""Forks beside the threads of a process group: a loader process must not hang before it has begun.

Two things go wrong when a process forks that is or was a rank, and both hang the child for good, mostly on a busy
machine. Gloo's threads drop the tensors of a collective that is over, for which each attaches to the interpreter for a
moment. In Python before 3.12 a child forked in that moment inherits the lock of the interpreter's list of threads as
taken, and waits for it (CPython issue 112275). And a process group that waits for the garbage collector is collected in
the child too, where its destructor joins threads that exist in the parent only.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time

_LIMIT_S = 0.25
"""How long a fork is put off at most: threads that compute all the time would hold it up for ever."""

_TASKS = "/proc/self/task"


@functools.cache
def make_forks_safe() -> None:
    """From now on let forks wait for a moment in which all other threads sleep, and children keep inherited garbage."""
    if sys.version_info < (3, 12) and os.path.isdir(_TASKS):
        os.register_at_fork(before=wait_for_sleep)
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=gc.freeze)


def wait_for_sleep(limit_s: float = _LIMIT_S) -> bool:
    """Block until all other threads of this process sleep, at most about ``limit_s``; return whether they do."""
    deadline = time.monotonic() + limit_s
    while _runs_elsewhere():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)  # lets go of the interpreter too, for which some of them wait
    return True


def _runs_elsewhere() -> bool:
    own = threading.get_native_id()
    return any(int(task) != own and _state(task) != "S" for task in os.listdir(_TASKS))


def _state(task: str) -> str:
    """Return the letter of a thread's state, as in proc(5); S if it has ended meanwhile."""
    try:
        with open(f"{_TASKS}/{task}/stat", encoding="utf-8", errors="replace") as file:
            line = file.read()
    except OSError:
        return "S"
    return line[line.rindex(")") + 2]  # the name before it may hold anything
