"""Changes to a rank's own process: safe forks, keeping freed memory, and appearing as the only process."""

import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.comm.rendezvous import poll_until

# --- Forks: a data loader process must not hang at its start

# The longest delay of a fork: threads that never stop computing would delay it forever.
_LIMIT_S = 0.25

_TASKS = "/proc/self/task"


@functools.cache
def make_forks_safe() -> None:
    """From now on, delay a fork until all other threads sleep, and let children keep inherited garbage."""
    # Each of the two problems hangs the child forever, mostly on a busy machine.
    if sys.version_info < (3, 12):
        # Gloo's threads release the tensors of a completed collective, for which they briefly attach to the
        # interpreter. A child that is forked at that moment inherits the lock of the interpreter's thread list in the
        # locked state, and waits for it forever (CPython issue 112275).
        os.register_at_fork(before=wait_for_sleep)
    # The child's garbage collector would also collect an unreferenced process group. The group's destructor joins
    # threads that exist in the parent only.
    os.register_at_fork(after_in_child=gc.freeze)


def wait_for_sleep(limit_s: float = _LIMIT_S) -> bool:
    """Block until all other threads of this process sleep, for about ``limit_s`` at most; return whether they do."""
    own_task = str(threading.get_native_id())

    def all_sleep() -> bool:
        return all(_thread_state(task) == "S" for task in os.listdir(_TASKS) if task != own_task)

    return poll_until(all_sleep, limit_s, 0.001)  # its pauses release the interpreter lock, which others may wait for


def _thread_state(task: str) -> str:
    """Return the letter of a thread's state, as in proc(5); S if the thread has ended."""
    with suppress(OSError):  # the name before it may contain any character
        return Path(f"{_TASKS}/{task}/stat").read_text(errors="replace").rpartition(") ")[2][0]
    return "S"


# --- Memory

# Constants of glibc's malloc.h; the largest block kept in the heap, and how much free memory the heap may keep.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BLOCK, _MOST_FREE = 2**28, 2**30


@functools.cache
def keep_freed_memory(*, for_threads: bool = False) -> None:
    """From now on in this process, make the C library keep the memory that a step frees for the next step.

    Args:
        for_threads: Also for threads that start from now on. They then share the heap of the first thread.
    """
    # By default glibc returns free memory at the end of the heap, and every block above 32 MiB, to the system. The
    # system zeroes it page by page when the next step needs it: for an MLP with 7 million parameters, 9,000 page faults
    # per step and a fifth of its processor time. Replicas in threads pay twice, since page faults of one process wait
    # for each other. So the process keeps up to 1 GiB that it has used. Other C libraries have no such function, and
    # glibc settings of the user have priority.
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _MOST_FREE)
        if for_threads:
            # By default a thread gets an arena made of pieces of 64 MiB. A piece returns to the system when all of it
            # is free, whatever the thresholds, and a larger block never fits in one.
            mallopt(_M_ARENA_MAX, 1)
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK):
            mallopt(_M_MMAP_THRESHOLD, 2**25)  # the maximum of older versions


# --- A view as the only process

_PREFIXES = ("", "LOCAL_", "GROUP_", "ROLE_")
_ALONE = {f"{prefix}{name}": value for prefix in _PREFIXES for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"))}


@contextmanager
def single_process_view() -> Iterator[None]:
    """Inside the block, environment and torch.distributed say rank 0 of 1, except for a group that is passed.

    Values that were read before do not change. Other threads see the same.
    """
    true_rank, true_size = dist.get_rank, dist.get_world_size

    def rank(group: Any = None) -> int:
        return 0 if group is None else true_rank(group)

    def size(group: Any = None) -> int:
        return 1 if group is None else true_size(group)

    # Only variables that are set: a program that finds RANK assumes that it is part of a job.
    true_environ = {name: os.environ[name] for name in _ALONE if name in os.environ}
    os.environ.update({name: _ALONE[name] for name in true_environ})
    modules = vars(dist), vars(dist.distributed_c10d)
    for module in modules:
        module.update(get_rank=rank, get_world_size=size)
    try:
        yield
    finally:
        for module in modules:
            module.update(get_rank=true_rank, get_world_size=true_size)
        os.environ.update(true_environ)
