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
from lockstep.study.doctor.findings import GIB, HANG, MIB, NOTE, SLOW, WRONG, Facts, Plan, Problem, check, plural, size
from lockstep.study.doctor.task import TaskFacts, in_time

_SECTION = "Memory, cores and limits"


@dataclass(frozen=True)
class Cores(Facts):
    """Cores, and what is to run on them.

    Attributes:
        plan: The run.
        logical: That the machine has.
        affinity: That this process may run on.
        physical: Without those that share one with another; ``None`` if the system does not say.
        quota: Cores' worth of time that the control group allows; ``None`` without a limit.
        threads: That each rank was told to use; ``None`` if it was told nothing.
        variable: That told it.
        started_threads: Threads that torch chose in this process.
    """

    section, topic = _SECTION, "cores"

    plan: Plan
    logical: int
    affinity: int
    physical: int | None = None
    quota: float | None = None
    threads: int | None = None
    variable: str = "OMP_NUM_THREADS"
    started_threads: int = 1

    @property
    def usable(self) -> float:
        """Cores' worth of time that this process and its children get."""
        return min(self.affinity, self.quota) if self.quota is not None else self.affinity

    @property
    def fair_threads(self) -> int:
        """Threads of a rank that use each physical core once."""
        return max(1, int(min(self.usable, self.physical or self.usable) // self.plan.devices))

    @property
    def processes(self) -> int:
        """Ranks and their loader workers."""
        return self.plan.devices * (1 + (self.plan.workers or 0))

    @property
    def is_pinned(self) -> bool:
        """Whether an affinity mask leaves fewer cores than there are processes, though the machine has more."""
        return self.affinity < min(self.logical, self.processes)

    @property
    def summary(self) -> str:
        """Cores, the limits on them, and threads of a rank."""
        physical = f", {self.physical} physical" if self.physical and self.physical < self.logical else ""
        quota = f", a quota of {self.quota:g}" if self.quota is not None else ""
        each = f"{self.usable / self.plan.devices:.3g} for each of {plural(self.plan.devices, 'rank')}"
        return f"{self.affinity} of {plural(self.logical, 'core')}{physical}{quota}; {each}"

    @property
    def threads_summary(self) -> str:
        """How many threads a rank will use."""
        if self.threads is not None:
            return f"{self.variable}={self.threads}"
        chosen = f"lockstep run sets {self.fair_threads}, torchrun 1, python alone uses {self.started_threads}"
        return f"{self.variable} is not set: {chosen}"


def read_cores(plan: Plan, environ: Mapping[str, str]) -> Cores:
    """Return what cores there are, and what is to run on them."""
    logical = psutil.cpu_count() or os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    threads, variable = None, "OMP_NUM_THREADS"
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # MKL goes by its own if both are set
        first = environ.get(name, "").split(",")[0].strip()  # may be a list, one number for each level of nesting
        if first.isdigit() and int(first) > 0:
            threads, variable = int(first), name
            break
    physical, started = psutil.cpu_count(logical=False), torch.get_num_threads()
    return Cores(plan, logical, affinity, physical, env.cpu_quota(), threads, variable, started)


@check(Cores)
def threads_too_many(facts: Cores) -> Iterator[Problem]:
    """``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS``, times the ranks, exceeds the cores.

    Cost: Threads of one operation wait for each other at its end, so one that has no core holds up the others:
        operations take several times as long.
    Fix: Let the ranks together use each core once.
    """
    ranks, threads = facts.plan.devices, facts.threads
    if threads is not None and ranks * threads > max(facts.usable, ranks):
        total = f"are {ranks * threads} threads for {facts.usable:g} cores"
        found = f"{facts.variable}={threads} on {plural(ranks, 'rank')} {total}."
        yield Problem(SLOW, found, f"export {facts.variable}={facts.fair_threads}")


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
        found = (
            f"{facts.variable}={threads} on {plural(ranks, 'rank')} use {ranks * threads} of {facts.usable:g} cores."
        )
        yield Problem(SLOW, found, f"export {facts.variable}={facts.fair_threads}")


@check(Cores)
def ranks_over_cores(facts: Cores) -> Iterator[Problem]:
    """More CPU ranks than cores.

    Cost: They take turns; at each collective, all wait for the one whose turn comes last.
    Fix: Start as many as there are cores.
    """
    ranks = facts.plan.devices
    if not facts.is_pinned and not facts.plan.on_gpus and ranks > max(1.0, facts.usable):
        found = f"{plural(ranks, 'rank')} compute on {facts.usable:g} CPU cores."
        yield Problem(SLOW, found, f"lockstep run --devices {max(1, int(facts.usable))} train.py")


@check(Cores)
def workers_over_cores(facts: Cores) -> Iterator[Problem]:
    """Ranks and loader workers together are more processes than cores.

    Cost: Workers take time from the ranks that they load for, and one slow rank makes all wait.
    Fix: Use fewer.
    """
    ranks, workers = facts.plan.devices, facts.plan.workers
    ranks_fit = facts.plan.on_gpus or ranks <= max(1.0, facts.usable)
    if workers and ranks_fit and not facts.is_pinned and facts.processes > facts.usable:
        each = f"{facts.usable / facts.processes:.2g} of a core for each"
        found = (
            f"{plural(ranks, 'rank')} with {plural(workers, 'loader worker')} each are {facts.processes} processes for "
            f"{facts.usable:g} cores: {each}."
        )
        fitting = max(0, int(facts.usable // ranks) - 1)
        yield Problem(
            SLOW, found, f"lockstep train TASK.py --workers {fitting}  # or num_workers={fitting} in a script"
        )


@check(Cores)
def cpu_quota(facts: Cores) -> Iterator[Problem]:
    """The control group allows fewer cores' worth of time than the process sees.

    A note for several ranks, which launchers tell how many threads to use.

    Cost: What starts a thread for each core that it sees is stopped by the kernel for a part of every tenth of a
        second; one rank that is stopped makes all others wait.
    Fix: Say how many threads a rank may use, or start the container with more.
    """
    quota, threads, ranks = facts.quota, facts.threads, facts.plan.devices
    if quota is not None and quota < facts.affinity and (threads is None or ranks * threads > quota):
        severity = SLOW if ranks == 1 and facts.started_threads > quota else NOTE
        seen = f"programs see {plural(facts.affinity, 'core')}"
        found = f"The container may use {quota:g} cores' worth of time, but {seen}."
        paste = f"export OMP_NUM_THREADS={facts.fair_threads}  # or: docker run --cpus {facts.affinity}"
        yield Problem(severity, found, paste)


@check(Cores)
def cpu_affinity(facts: Cores) -> Iterator[Problem]:
    """The process may run on few of the machine's cores: ``taskset``, or a scheduler that gave it so many.

    Cost: Ranks and loader workers take turns on them, while other cores may be idle.
    Fix: Ask the scheduler for more cores a task; SLURM gives one unless it is told otherwise.
    """
    if facts.is_pinned:
        cores = f"{facts.affinity} of the machine's {plural(facts.logical, 'core')}"
        found = f"This process may run on {cores}, for {plural(facts.processes, 'process', 'es')}."
        each = 1 + (facts.plan.workers or 0)
        yield Problem(SLOW, found, f"srun --cpus-per-task={each} ...  # or: taskset -c 0-{facts.logical - 1}")


_RANK_BYTES = 250 * MIB
"""Of a process that has imported torch, before it has a model."""

_BATCHES_AHEAD = 2
"""Batches that each loader process loads before they are asked for; torch's own number."""

_NCCL_BYTES = 64 * MIB
"""What NCCL shares in /dev/shm for each rank of a machine, about: buffers of every channel between processes."""

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
        task: What a task says of its needs, if there is one.
    """

    section, topic = _SECTION, "memory"

    plan: Plan
    shm_bytes: int
    shm_free_bytes: int
    available_bytes: int
    task: TaskFacts | None = None

    @property
    def batch_bytes(self) -> int:
        """Of one rank's batch; 0 if no task says."""
        return (self.task and self.task.batch_bytes) or 0

    @property
    def rank_need_bytes(self) -> int:
        """What a CPU rank needs at least: the interpreter, weights, gradients, Adam's state."""
        return _RANK_BYTES + ((self.task.weight_bytes or 0) + 3 * self.task.trained_bytes if self.task else 0)

    @property
    def summary(self) -> str:
        """How much there is of both kinds."""
        shm = f"{size(self.shm_free_bytes)} free of {size(self.shm_bytes)}" if self.shm_bytes else "no /dev/shm"
        return f"{size(self.available_bytes)} available; /dev/shm has {shm}"


def read_memory(plan: Plan, task: TaskFacts | None, shm: Path = _SHM) -> Memory:
    """Return what memory there is, and what is known of the need for it."""
    available = psutil.virtual_memory().available
    limit = min(_group_numbers("memory.max", "memory.limit_in_bytes"), default=None)
    if limit is not None:
        used = min(_group_numbers("memory.current", "memory.usage_in_bytes"), default=0)
        available = min(available, max(0, limit - used))
    try:
        total, _, free = shutil.disk_usage(shm)
    except OSError:
        total = free = 0
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
    nccl_bytes = ranks * _NCCL_BYTES if facts.plan.on_gpus and ranks > 1 else 0
    need = ranks * workers * (_BATCHES_AHEAD + 1) * facts.batch_bytes + nccl_bytes
    if need > facts.shm_free_bytes:
        users = [f"{ranks} x {plural(workers, 'loader worker')}"] * bool(workers) + ["NCCL"] * bool(nccl_bytes)
        free = f"/dev/shm has {size(facts.shm_free_bytes)} free of {size(facts.shm_bytes)}"
        found = f"{free}; {size(need)} is needed for {' and '.join(users)}."
    elif not facts.shm_bytes:
        found = "There is no /dev/shm."
    elif facts.shm_bytes <= _DOCKER_DEFAULT_BYTES:
        found = f"/dev/shm has {size(facts.shm_bytes)}, as containers have by default."
    else:
        return
    gib = max(1, -(-2 * need // GIB))
    paste = f"docker run --shm-size={gib}g ...  # or: sudo mount -o remount,size={gib}g /dev/shm"
    yield Problem(HANG if need or workers else NOTE, found, paste)


@check(Memory)
def memory_small(facts: Memory) -> Iterator[Problem]:
    """CPU ranks need more memory than there is, before activations.

    At least: 250 MiB for Python and torch each, the weights, as much again for gradients, and twice as much for Adam.
    Activations come on top. The limit of the container counts.

    Cost: The kernel kills a rank when memory is gone, and the run ends.
    Fix: Start fewer ranks, or divide the optimizer's state among them.
    """
    need = facts.plan.devices * facts.rank_need_bytes
    if not facts.plan.on_gpus and need > facts.available_bytes:
        found = (
            f"{plural(facts.plan.devices, 'rank')} need {size(need)} at least, before activations; "
            f"{size(facts.available_bytes)} are available."
        )
        fitting = max(1, facts.available_bytes // facts.rank_need_bytes)
        yield Problem(HANG, found, f"lockstep train TASK.py --devices {fitting} --strategy ddp-zero1")


_FILES_OF_A_BATCH = 16
"""Files that a batch on its way from a worker keeps open: one for each of its tensors."""


@dataclass(frozen=True)
class Limits(Facts):
    """Limits of this process; ``None`` stands for none.

    Attributes:
        plan: The run.
        open_files: The soft limit.
        open_files_hard: What it may be raised to.
        locked_bytes: Of memory that may be pinned.
        has_infiniband: Whether there is an active port.
        temp_folder: The folder for temporary files.
    """

    section, topic = _SECTION, "limits"

    plan: Plan
    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    has_infiniband: bool = False
    temp_folder: str = "/tmp"

    @property
    def summary(self) -> str:
        """The limits."""
        files = "any number of" if self.open_files is None else f"{self.open_files:,}"
        locked = "any amount of" if self.locked_bytes is None else size(self.locked_bytes)
        return f"{files} open files, {locked} locked memory"


def read_limits(plan: Plan, *, has_infiniband: bool) -> Limits:
    """Return the limits of this process."""
    values = [*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]]
    soft, hard, locked = (None if value == resource.RLIM_INFINITY else value for value in values)
    return Limits(plan, soft, hard, locked, has_infiniband, tempfile.gettempdir())


@check(Limits)
def open_files(facts: Limits) -> Iterator[Problem]:
    """A process may have too few files open.

    The estimate is 64 for Python and torch, 4 for each rank of the job, and 16 for each batch on its way from a worker:
    with torch's default way of sharing, each tensor in flight is an open file.

    Cost: A rank fails with 'Too many open files', perhaps only after hours.
    Fix: Raise the limit in the shell that starts the run; where only root can, let workers pass batches without files.
    """
    limit = facts.open_files
    batches = (facts.plan.workers or 0) * _BATCHES_AHEAD
    needed = 64 + 4 * facts.plan.world_size + batches * _FILES_OF_A_BATCH
    if limit is not None and needed > limit:
        wanted = min(65536, facts.open_files_hard or 65536)
        without_files = "torch.multiprocessing.set_sharing_strategy('file_system')  # at the top of the script"
        found = f"A process may have {plural(limit, 'file')} open; a rank of this run needs about {needed}."
        yield Problem(HANG, found, f"ulimit -n {wanted}" if wanted > limit else without_files)


@check(Limits)
def locked_memory(facts: Limits) -> Iterator[Problem]:
    """There is an InfiniBand card, and the limit of locked memory is below 1 GiB.

    Cost: NCCL cannot register its buffers with the card, which locks them, and fails at the first collective.
    Fix: Lift the limit: in the container, or in /etc/security/limits.conf for a login.
    """
    if facts.has_infiniband and facts.locked_bytes is not None and facts.locked_bytes < GIB:
        found = f"A process may lock {size(facts.locked_bytes)} of memory, and there is an InfiniBand card."
        login = "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf  # or this"
        yield Problem(HANG, found, f"docker run --ulimit memlock=-1 ...\n{login}")


@check(Limits)
def temp_folder(facts: Limits) -> Iterator[Problem]:
    """There are loader workers, and the folder for temporary files (``TMPDIR``) has a name of over 75 characters.

    Cost: Loader workers hand tensors over by sockets in it, whose names may have 107: the first batch never comes.
    Fix: Name a shorter folder. Ranks of lockstep run and train, and fit, take another one for these sockets.
    """
    folder = facts.temp_folder
    if facts.plan.workers and env.is_socket_folder_too_long(folder):
        found = f"The folder for temporary files has a name of {len(folder)} characters: {folder}."
        yield Problem(HANG, found, "export TMPDIR=/tmp")


_SILENT_S = 3.0
"""A file system that has not answered by then, as one over a broken network, is said to be silent."""

_KEPT = 3
"""Checkpoints that lie there at a time: two that are kept, and the one being written."""


@dataclass(frozen=True)
class Disk(Facts):
    """The folder for checkpoints.

    Attributes:
        folder: As it was named.
        problem: Why nothing can be written there; ``None`` if it can.
        filesystem: Its kind, such as ``ext4``.
        free_bytes: Left there.
        checkpoint_bytes: Weights and optimizer state, where a task says.
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
        free = f"({self.filesystem}) {size(self.free_bytes)} free"
        return f"{self.folder}: {self.problem or free}"


def read_disk(folder: str, checkpoint_bytes: int | None) -> Disk:
    """Return whether ``folder``, or the nearest folder above that is there, can be written, and what is free."""
    place = Path(folder).expanduser().resolve()
    while not place.exists() and place != place.parent:
        place = place.parent

    def write() -> int:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * MIB)
            os.fsync(file.fileno())
        return shutil.disk_usage(place).free

    try:
        free = in_time(_SILENT_S, write)
    except TimeoutError:
        return Disk(folder, f"it did not take a MiB within {_SILENT_S:g} s")
    except OSError as error:
        return Disk(folder, error.strerror or str(error))
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    longest = max(mounts, key=lambda part: len(Path(part.mountpoint).parts), default=None)
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
"""Variables, with the values that cost something."""


@dataclass(frozen=True)
class Switches(Facts):
    """The environment, as far as debugging switches are concerned."""

    section, topic = "Software and storage", "debug switches"

    environ: Mapping[str, str]

    @property
    def on(self) -> list[str]:
        """The switches that are on, as ``NAME=VALUE``."""
        found = {name: self.environ.get(name) for name in _DEBUG_SWITCHES}
        return [f"{name}={value}" for name, value in found.items() if value in _DEBUG_SWITCHES[name]]

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
    Fix: Unset it, unless you are looking for a fault right now.
    """
    for switch in facts.on:
        yield Problem(SLOW, f"{switch} is set.", f"unset {switch.partition('=')[0]}")
