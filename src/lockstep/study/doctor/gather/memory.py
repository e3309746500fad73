"""The facts of memory and of the limits on it and on others."""

from __future__ import annotations

import contextlib
import resource
import shutil
import tempfile
from pathlib import Path

import psutil

from lockstep.env import is_socket_folder_too_long, read_groups
from lockstep.study.doctor.finding import NotChecked
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.topics.limits import LimitFacts
from lockstep.study.doctor.topics.memory import MemoryFacts
from lockstep.study.doctor.topics.task import TaskFacts

SHM = Path("/dev/shm")


def memory_facts(plan: Plan, task: TaskFacts | None, shm: Path = SHM) -> MemoryFacts:
    """Return what memory there is, and what is known of the need for it."""
    available = psutil.virtual_memory().available
    limit = memory_limit()
    if limit is not None:
        used = [int(text) for text in _of_memory("memory.current", "memory.usage_in_bytes") if text.isdigit()]
        available = min(available, max(0, limit - min(used, default=0)))
    try:
        usage = shutil.disk_usage(shm)
    except OSError:
        usage = None
    return MemoryFacts(
        shm_bytes=None if usage is None else usage.total,
        shm_free_bytes=0 if usage is None else usage.free,
        available_bytes=available,
        limit_bytes=limit,
        ranks=plan.devices,
        workers=plan.workers,
        on_gpus=plan.on_gpus,
        batch_bytes=None if task is None else task.batch_bytes,
        weight_bytes=None if task is None else task.weight_bytes,
        trained_bytes=0 if task is None else task.trained_bytes,
    )


def memory_limit() -> int | None:
    """Return the memory that the tightest of this process's control groups allows, if less than the machine has."""
    limits = [int(text) for text in _of_memory("memory.max", "memory.limit_in_bytes") if text.isdigit()]
    limit = min(limits, default=None)
    return limit if limit is not None and limit < psutil.virtual_memory().total else None


def limit_facts(plan: Plan, *, threads: int, has_infiniband: bool) -> tuple[LimitFacts, list[NotChecked]]:
    """Return the limits of this process and its container."""
    soft, hard = (_finite(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    user = _finite(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    group = [int(text) for text in read_groups("pids", "pids.max") if text.isdigit()]
    running, whose, processes = 0, "this user", user
    if group and (user is None or min(group) < user):
        processes, whose = min(group), "this container"
        running = max((int(text) for text in read_groups("pids", "pids.current") if text.isdigit()), default=0)
    elif user is not None:
        running = _threads_of_user()
    return LimitFacts(
        open_files=soft,
        open_files_hard=hard,
        locked_bytes=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        processes=processes,
        processes_of=whose,
        running=running,
        ranks=plan.devices,
        world_size=plan.world_size,
        workers=plan.workers or 0,
        threads=threads,
        has_infiniband=has_infiniband,
        long_temp_folder=tempfile.gettempdir() if is_socket_folder_too_long(tempfile.gettempdir()) else None,
    ), []


def _threads_of_user() -> int:
    own = psutil.Process().uids().real
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == own:
                count += process.num_threads()
    return count


def _of_memory(new: str, old: str) -> list[str]:
    return read_groups("memory", new) or read_groups("memory", old)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
