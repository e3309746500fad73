"""What a rank changes about its own process: safe forks, memory that is kept, and a view as the only process."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# --- Forks: a loader process must not hang before it has begun

# How long a fork is put off at most: threads that compute all the time would hold it up for ever.
_LIMIT_S = 0.25

_TASKS = "/proc/self/task"


@functools.cache
def make_forks_safe() -> None:
    """From now on let forks wait for a moment in which all other threads sleep, and children keep inherited garbage."""
    # Both hang the child for good, mostly on a busy machine.
    if sys.version_info < (3, 12):
        # Gloo's threads drop the tensors of a collective that is over, for which each attaches to the interpreter for
        # a moment. A child forked in that moment inherits the lock of the interpreter's list of threads as taken, and
        # waits for it (CPython issue 112275).
        os.register_at_fork(before=wait_for_sleep)
    # A process group that waits for the garbage collector would be collected in the child too, where its destructor
    # joins threads that exist in the parent only.
    os.register_at_fork(after_in_child=gc.freeze)


def wait_for_sleep(limit_s: float = _LIMIT_S) -> bool:
    """Block until all other threads of this process sleep, at most about ``limit_s``; return whether they do."""
    deadline = time.monotonic() + limit_s
    own = str(threading.get_native_id())
    while any(_thread_state(task) != "S" for task in os.listdir(_TASKS) if task != own):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)  # lets go of the interpreter too, for which some of them wait
    return True


def _thread_state(task: str) -> str:
    """Return the letter of a thread's state, as in proc(5); S if it has ended meanwhile."""
    try:
        with open(f"{_TASKS}/{task}/stat", encoding="utf-8", errors="replace") as file:
            line = file.read()
    except OSError:
        return "S"
    return line[line.rindex(")") + 2]  # the name before it may hold anything


# --- Memory

# Numbers of glibc's malloc.h, and what is kept: blocks up to this size in the heap, and so much of it while it is free.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BLOCK, _MOST_FREE = 2**28, 2**30


@functools.cache
def keep_freed_memory(*, for_threads: bool = False) -> None:
    """Have the C library keep the memory that a step frees, for the next step, from now on in this process.

    Args:
        for_threads: Whether also that of threads started from now on, which then share the heap of the first thread.
    """
    # By itself glibc gives free memory at the end of the heap back to the system, and every block above 32 MiB; and the
    # system zeroes it, page by page, when a step asks for it again: 9,000 page faults a step of an MLP with 7 million
    # parameters, a fifth of its processor time; replicas in threads pay twice, since faults of one process wait for
    # each other. So up to 1 GiB that was in use stays with the process. Other C libraries have no such function, and
    # who has set glibc wins.
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _MOST_FREE)
        if for_threads:
            # By itself a thread gets an arena of its own, made of pieces of 64 MiB: a piece goes back to the system
            # when all of it is free, whatever the thresholds, and a larger block never lies in one.
            mallopt(_M_ARENA_MAX, 1)
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK):
            mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that older versions take


# --- A view as the only process

_PREFIXES = ("", "LOCAL_", "GROUP_", "ROLE_")
_ALONE = {f"{prefix}{name}": value for prefix in _PREFIXES for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"))}


@contextmanager
def single_process_view() -> Iterator[None]:
    """Within, environment and torch.distributed say rank 0 of 1; for a group that is named they say the truth.

    What was read before stays as it was read. Other threads see the same.
    """
    true_rank, true_size = dist.get_rank, dist.get_world_size

    def rank(group: Any = None) -> int:
        return 0 if group is None else true_rank(group)

    def size(group: Any = None) -> int:
        return 1 if group is None else true_size(group)

    # Only names that are set: a program that sees RANK takes part in a job.
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {key: value for key, value in _ALONE.items() if key in os.environ}))
        for module in (dist, dist.distributed_c10d):
            stack.enter_context(patch.object(module, "get_rank", rank))
            stack.enter_context(patch.object(module, "get_world_size", size))
        yield
