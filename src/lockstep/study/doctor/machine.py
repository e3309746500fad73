"""Cores, memory, limits, the checkpoint folder and debugging switches: will the ranks fit on this machine?"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lockstep import env
from lockstep.study.doctor.findings import GIB, HANG, MIB, SLOW, WRONG, Facts, Plan, Problem, check, plural
from lockstep.study.doctor.task import TaskFacts, in_time
from lockstep.telemetry.live_view import size

_SECTION = "Memory, cores and limits"


@dataclass(frozen=True)
class Cores(Facts):
    """Cores, and what is to run on them.

    Attributes:
        plan: The run.
        logical: That the machine has.
        usable: Cores' worth of time that this process and its children get, by affinity and the container's quota.
        physical: Without those that share one with another; ``None`` if the system does not know.
        threads: That each rank uses, if that is known.
        threads_from: Where that number comes from.
    """

    section, topic = _SECTION, "cores"

    plan: Plan
    logical: int
    usable: float
    physical: int | None = None
    threads: int | None = None
    threads_from: str = "OMP_NUM_THREADS"

    @property
    def fair_threads(self) -> int:
        """Threads of a rank that use each physical core once."""
        # Two hardware threads of a core share its vector units: a second thread of matrix products gains nothing.
        return max(1, int(min(self.usable, self.physical or self.usable) // self.plan.devices))

    @property
    def summary(self) -> str:
        """Cores, and threads of a rank."""
        physical = f" ({self.physical} physical)" if self.physical and self.physical < self.logical else ""
        threads = f"{self.threads_from}={self.threads}" if self.threads else "OMP_NUM_THREADS is not set"
        ranks = plural(self.plan.devices, "rank")
        return f"{self.usable:g} of {plural(self.logical, 'core')}{physical} for {ranks}; {threads}"


def read_cores(plan: Plan, environ: Mapping[str, str]) -> Cores:
    """Return what cores there are, and what is to run on them."""
    logical = psutil.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota = env.cpu_quota()  # of a container; torch and Python do not know of it
    usable = affinity if quota is None else min(affinity, quota)
    threads, source = None, "OMP_NUM_THREADS"
    if plan.devices == 1:  # launchers of several ranks set it themselves
        threads, source = torch.get_num_threads(), "torch.get_num_threads()"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # MKL goes by its own if both are set
        first = environ.get(name, "").split(",")[0].strip()  # may be a list, one number for each level of nesting
        if first.isdigit() and int(first) > 0:
            threads, source = int(first), name
    return Cores(plan, logical, usable, psutil.cpu_count(logical=False), threads, source)


@check(Cores)
def threads_too_many(facts: Cores) -> Iterator[Problem]:
    """The threads of all ranks together are more than the cores.

    Each rank has as many as ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` asks for. Without these, a single process starts
    one for each core that it finds, although a container's quota may allow fewer.

    Cost: Threads of one operation wait for each other at its end, so one that has no core holds up the others:
        operations take several times as long.
    Fix: Let the ranks together use each core once.
    """
    ranks, threads = facts.plan.devices, facts.threads
    if threads is not None and ranks * threads > max(facts.usable, ranks):
        total = f"are {ranks * threads} threads for {facts.usable:g} cores"
        found = f"{facts.threads_from}={threads} on {plural(ranks, 'rank')} {total}."
        yield Problem(SLOW, found, f"export OMP_NUM_THREADS={facts.fair_threads}")


@check(Cores)
def threads_too_few(facts: Cores) -> Iterator[Problem]:
    """CPU ranks are told to use so few threads that at least half of the cores stay idle.

    torchrun sets ``OMP_NUM_THREADS=1`` unless it is set; ``lockstep run`` divides the cores among the ranks.

    Cost: The other cores are idle while the ranks compute.
    Fix: Let the ranks together use each core once, or start more ranks.
    """
    ranks, threads = facts.plan.devices, facts.threads
    if threads is None or facts.plan.on_gpus or facts.fair_threads <= threads:
        return
    if 2 * ranks * threads <= facts.usable:
        used = f"use {ranks * threads} of {facts.usable:g} cores"
        found = f"{facts.threads_from}={threads} on {plural(ranks, 'rank')} {used}."
        yield Problem(SLOW, found, f"export OMP_NUM_THREADS={facts.fair_threads}")


@check(Cores)
def processes_over_cores(facts: Cores) -> Iterator[Problem]:
    """Ranks and their loader workers are more processes than this process has cores.

    The cores are those that an affinity mask (``taskset``, a scheduler) and the container's quota allow.

    Cost: They take turns; at each collective, all ranks wait for the one whose turn comes last.
    Fix: Start fewer, or ask the scheduler for more cores; SLURM gives one a task unless it is told otherwise.
    """
    ranks, workers = facts.plan.devices, facts.plan.workers or 0
    processes = ranks * (1 + workers)
    # A quota may be below one core; a single process has nobody to take turns with.
    if processes <= max(1.0, facts.usable):
        return
    loaders = f" with {plural(workers, 'loader worker')} each are {processes} processes" if workers else ""
    fitting = max(0, int(facts.usable // ranks) - 1)
    paste = f"lockstep train TASK.py --workers {fitting}  # or num_workers={fitting} in a script"
    if ranks > facts.usable:
        paste = f"lockstep run --devices {max(1, int(facts.usable))} train.py"
    if facts.usable < min(facts.logical, processes):
        paste += f"\nsrun --cpus-per-task={1 + workers} ...  # or this: the machine has {plural(facts.logical, 'core')}"
    yield Problem(SLOW, f"{plural(ranks, 'rank')}{loaders} for {facts.usable:g} cores.", paste)


# Of a process that has imported torch, before it has a model.
_RANK_BYTES = 250 * MIB

# Batches that each loader process loads before they are asked for; torch's own number.
_BATCHES_AHEAD = 2

# What NCCL shares in /dev/shm for each rank of a machine, about: buffers of every channel between processes.
_NCCL_BYTES = 64 * MIB

_DOCKER_DEFAULT_BYTES = 64 * MIB
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Memory(Facts):
    """Memory, and what is known of the need for it.

    Attributes:
        plan: The run.
        shm_bytes: Size of /dev/shm; 0 if there is none.
        shm_free_bytes: Of it.
        available_bytes: Memory that processes can get without swapping, within the limit of the container.
        task: The task, if there is one.
    """

    section, topic = _SECTION, "memory"

    plan: Plan
    shm_bytes: int
    shm_free_bytes: int
    available_bytes: int
    task: TaskFacts | None = None

    @property
    def rank_need_bytes(self) -> int:
        """What a CPU rank needs at least: the interpreter, weights, gradients, Adam's state."""
        return _RANK_BYTES + ((self.task.weight_bytes or 0) + 3 * self.task.trained_bytes if self.task else 0)

    @property
    def summary(self) -> str:
        """How much there is of both kinds."""
        shm = f"{size(self.shm_free_bytes)} free of {size(self.shm_bytes)}"
        return f"{size(self.available_bytes)} available; /dev/shm has {shm}"


def read_memory(plan: Plan, task: TaskFacts | None, shm: Path = _SHM) -> Memory:
    """Return what memory there is, and what is known of the need for it."""
    available = psutil.virtual_memory().available
    # The kernel kills at the limit of the innermost group that has one, however much the machine has left.
    limits = _group_numbers("memory.max", "memory.limit_in_bytes")
    if limits:
        used = min(_group_numbers("memory.current", "memory.usage_in_bytes"), default=0)
        available = min(available, max(0, min(limits) - used))
    total, free = shutil.disk_usage(shm)[::2] if shm.is_dir() else (0, 0)
    return Memory(plan, total, free, available, task)


def _group_numbers(*names: str) -> list[int]:
    """Return the numbers in a file of this process's control groups: version 2's name of it, then version 1's."""
    texts = next(filter(None, (env.read_groups("memory", name) for name in names)), [])
    return [int(text) for text in texts if text.isdigit()]


@check(Memory)
def shared_memory_small(facts: Memory) -> Iterator[Problem]:
    """Loader workers hand batches over in /dev/shm, and NCCL connects the processes of a machine there.

    Containers have 64 MiB of it by default. The need is workers x batches ahead x bytes of a batch (of a task's first
    sample), and about 64 MiB a rank for NCCL. lockstep's own backend ``shm`` does not use it: its memory has no name.

    Cost: Loader workers die of a bus error (SIGBUS) when it is full, and NCCL fails to start with processes on one
        machine.
    Fix: Start the container with more, or make it larger.
    """
    ranks, workers = facts.plan.devices, facts.plan.workers or 0
    batch_bytes = (facts.task and facts.task.batch_bytes) or 0
    nccl_bytes = ranks * _NCCL_BYTES if facts.plan.on_gpus and ranks > 1 else 0
    need = ranks * workers * (_BATCHES_AHEAD + 1) * batch_bytes + nccl_bytes
    # How large a batch is may not be known: then the container's default is taken for too little.
    is_default = workers > 0 and facts.shm_bytes <= _DOCKER_DEFAULT_BYTES
    if need > facts.shm_free_bytes or is_default:
        users = [f"{ranks} x {plural(workers, 'loader worker')}"] * bool(workers) + ["NCCL"] * bool(nccl_bytes)
        amount = f"at least {size(need)} is needed" if need else "that is little"
        free = f"/dev/shm has {size(facts.shm_free_bytes)} free of {size(facts.shm_bytes)}"
        gib = max(1, -(-2 * need // GIB))  # twice the need, rounded up
        paste = f"docker run --shm-size={gib}g ...  # or: sudo mount -o remount,size={gib}g /dev/shm"
        yield Problem(HANG, f"{free}; {amount} for {' and '.join(users)}.", paste)


@check(Memory)
def memory_small(facts: Memory) -> Iterator[Problem]:
    """CPU ranks need more memory than there is, before activations.

    At least: 250 MiB for Python and torch each, the weights, as much again for gradients, and twice as much for Adam.
    Activations come on top. The limit of the container counts.

    Cost: The kernel kills a rank when memory is gone, and the run ends.
    Fix: Start fewer ranks, or divide the optimizer's state among them.
    """
    ranks, available = facts.plan.devices, facts.available_bytes
    need = ranks * facts.rank_need_bytes
    if not facts.plan.on_gpus and need > available:
        least = f"{plural(ranks, 'rank')} need {size(need)} at least, before activations"
        fitting = max(1, available // facts.rank_need_bytes)
        paste = f"lockstep train TASK.py --devices {fitting} --strategy ddp-zero1"
        yield Problem(HANG, f"{least}; {size(available)} are available.", paste)


# Files that a batch on its way from a worker keeps open: one for each of its tensors.
_FILES_OF_A_BATCH = 16


@dataclass(frozen=True)
class Limits(Facts):
    """Limits of this process; ``None`` stands for none.

    Attributes:
        plan: The run.
        open_files: The soft limit.
        open_files_hard: What it may be raised to.
        temp_folder: The folder for temporary files.
    """

    section, topic = _SECTION, "limits"

    plan: Plan
    open_files: int | None
    open_files_hard: int | None
    temp_folder: str = "/tmp"

    @property
    def summary(self) -> str:
        """The limits."""
        return f"{'any number of' if self.open_files is None else self.open_files} open files"


def read_limits(plan: Plan) -> Limits:
    """Return the limits of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in limits)
    return Limits(plan, soft, hard, tempfile.gettempdir())


@check(Limits)
def open_files(facts: Limits) -> Iterator[Problem]:
    """A process may have too few files open.

    The estimate is 64 for Python and torch, 4 for each rank of the job, and 16 for each batch on its way from a worker:
    with torch's default way of sharing, each tensor in flight is an open file.

    Cost: A rank fails with 'Too many open files', perhaps only after hours.
    Fix: Raise the limit in the shell that starts the run; where only root can, let workers pass batches without files.
    """
    limit = facts.open_files
    needed = 64 + 4 * facts.plan.world_size + (facts.plan.workers or 0) * _BATCHES_AHEAD * _FILES_OF_A_BATCH
    if limit is not None and needed > limit:
        wanted = min(65536, facts.open_files_hard or 65536)
        without_files = "torch.multiprocessing.set_sharing_strategy('file_system')  # at the top of the script"
        found = f"A process may have {plural(limit, 'file')} open; a rank of this run needs about {needed}."
        yield Problem(HANG, found, f"ulimit -n {wanted}" if wanted > limit else without_files)


@check(Limits)
def temp_folder(facts: Limits) -> Iterator[Problem]:
    """There are loader workers, and the folder for temporary files (``TMPDIR``) has a name of over 75 characters.

    Cost: Loader workers hand tensors over by sockets in it, whose names may have 107: the first batch never comes.
    Fix: Name a shorter folder. Ranks of lockstep run and train take another one for these sockets.
    """
    folder = facts.temp_folder
    if facts.plan.workers and env.is_socket_folder_too_long(folder):
        found = f"The folder for temporary files has a name of {len(folder)} characters: {folder}."
        yield Problem(HANG, found, "export TMPDIR=/tmp")


# A file system that has not answered by then, as one over a broken network, is taken to be silent.
_SILENT_S = 3.0

# Checkpoints that lie there at a time: two that are kept, and the one being written.
_KEPT = 3


@dataclass(frozen=True)
class Disk(Facts):
    """The folder for checkpoints.

    Attributes:
        folder: As it was named.
        problem: Why nothing can be written there; ``None`` if it can.
        filesystem: Its kind, such as ``ext4``.
        free_bytes: Left there.
        checkpoint_bytes: Weights and optimizer state, where they are known from a task.
    """

    section, topic = "Software and storage", "checkpoints"

    folder: str
    problem: str | None = None
    filesystem: str = ""
    free_bytes: int = 0
    checkpoint_bytes: int | None = None

    @property
    def summary(self) -> str:
        """How full it is, or why it cannot be written."""
        return f"{self.folder}: {self.problem or f'({self.filesystem}) {size(self.free_bytes)} free'}"


def read_disk(folder: str, checkpoint_bytes: int | None) -> Disk:
    """Return whether ``folder``, or the nearest folder above that is there, can be written, and what is free."""
    place = Path(folder).expanduser().resolve()
    while not place.exists():  # the run would make it there
        place = place.parent

    def write() -> int:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * MIB)
            os.fsync(file.fileno())  # over a network, quotas and lost servers show only here
        return shutil.disk_usage(place).free

    try:
        free = in_time(_SILENT_S, write)
    except TimeoutError:
        return Disk(folder, f"it did not take a MiB within {_SILENT_S:g} s")
    except OSError as error:
        return Disk(folder, error.strerror or str(error))
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    # Mounts lie within each other: the innermost has the folder.
    longest = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return Disk(folder, None, longest.fstype if longest else "", free, checkpoint_bytes)


@check(Disk)
def checkpoint_folder(facts: Disk) -> Iterator[Problem]:
    """The folder cannot be written, does not answer, or lies in memory.

    Cost: The run ends when it writes its first checkpoint; those in memory are gone with the next start of the machine.
    Fix: Name a folder on a disk that can be written.
    """
    paste = "lockstep train TASK.py --checkpoint ~/checkpoints"
    if facts.problem is not None:
        yield Problem(HANG, f"Nothing can be written to {facts.folder}: {facts.problem}.", paste)
    elif facts.filesystem in ("tmpfs", "ramfs"):
        yield Problem(WRONG, f"{facts.folder} lies in memory ({facts.filesystem}).", paste)


@check(Disk)
def disk_full(facts: Disk) -> Iterator[Problem]:
    """There is no room for three checkpoints (two are kept while the next is written), or else for 1 GiB.

    Cost: The run ends when a checkpoint no longer fits.
    Fix: Make room, or name another folder.
    """
    needed = _KEPT * facts.checkpoint_bytes if facts.checkpoint_bytes else GIB
    if facts.problem is None and facts.free_bytes < needed:
        whose = f"{_KEPT} checkpoints of {size(facts.checkpoint_bytes)}" if facts.checkpoint_bytes else "even one model"
        found = f"{facts.folder} has {size(facts.free_bytes)} left, too little for {whose}."
        yield Problem(HANG, found, "df -h  # then: lockstep train TASK.py --checkpoint DIR")


# Variables, with the values that cost something.
_DEBUG_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_IB_DISABLE": ("1",),
    "NCCL_DEBUG": ("TRACE",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "MALLOC_CHECK_": ("1", "2", "3"),
    "PYTHONMALLOC": ("debug", "malloc_debug"),
    "PYTHONDEVMODE": ("1",),
}


@dataclass(frozen=True)
class Switches(Facts):
    """The environment, as far as debugging switches are concerned."""

    section, topic = "Software and storage", "debug switches"

    environ: Mapping[str, str]

    @property
    def on(self) -> list[str]:
        """The switches that are on, as ``NAME=VALUE``."""
        values = {name: self.environ.get(name) for name in _DEBUG_SWITCHES}
        return [f"{name}={value}" for name, value in values.items() if value in _DEBUG_SWITCHES[name]]

    @property
    def summary(self) -> str:
        """Those that are on."""
        return ", ".join(self.on) or "none that cost time"


@check(Switches)
def debug_switch(facts: Switches) -> Iterator[Problem]:
    """An environment variable is set that helps to find faults and costs time.

    ``CUDA_LAUNCH_BLOCKING`` (the CPU waits for every kernel), ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (every collective is
    preceded by another), ``NCCL_P2P_DISABLE``, ``NCCL_SHM_DISABLE``, ``NCCL_IB_DISABLE`` (slower ways between GPUs),
    ``NCCL_DEBUG=TRACE``, ``PYTORCH_NO_CUDA_MEMORY_CACHING`` (every tensor is allocated by the driver),
    ``MALLOC_CHECK_``, ``PYTHONMALLOC``, ``PYTHONDEVMODE`` (the heap is checked at every call).

    Cost: Each makes every step slower, some of them several times.
    Fix: Unset it, unless a fault is being searched for right now.
    """
    for switch in facts.on:
        yield Problem(SLOW, f"{switch} is set.", f"unset {switch.partition('=')[0]}")
