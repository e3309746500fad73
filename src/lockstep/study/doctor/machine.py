"""GPUs, cores, memory, limits, the checkpoint folder and debugging switches: will the ranks fit on this machine?"""

from __future__ import annotations

import csv
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lockstep import env
from lockstep.study.common import MIB
from lockstep.study.doctor.findings import HANG, SLOW, WRONG, NotChecked, Plan, Problem, check, in_time, listed, plural
from lockstep.study.doctor.task import TaskFacts
from lockstep.telemetry.rank_state import format_bytes
from lockstep.telemetry.resources import free_and_total_bytes

_TIMEOUT_S = 4.0
# A GPU with so much of its memory taken is used by somebody else; a desktop takes less.
_IN_USE = 0.1


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it; 0 for what it does not report."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine that the run may use.

    Attributes:
        gpus: As the driver lists them; empty without one.
        num_usable: How many torch can use.
        torch_cuda: The CUDA version that torch was built for, if any.
        has_driver: Whether NVIDIA's driver is installed, and CUDA_VISIBLE_DEVICES leaves it a GPU to show.
        num_wanted: How many ranks the run has on this machine.
    """

    gpus: tuple[Gpu, ...]
    num_usable: int
    torch_cuda: str | None
    has_driver: bool
    num_wanted: int

    @property
    def summary(self) -> str:
        """How many there are, of which models."""
        if self.num_usable == 0:
            return "no GPU that torch can use"
        models = ", ".join(dict.fromkeys(gpu.name for gpu in self.gpus))
        return f"{plural(self.num_usable, 'GPU')} {models}".strip()


def read_gpus(plan: Plan) -> tuple[Gpus, list[NotChecked]]:
    """Return what GPUs there are. Blocks some seconds at most."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Set to nothing or -1, it hides all, as one does to train on the CPU.
    is_hidden = chosen is not None and chosen.strip() in ("", "-1")
    num_usable, has_driver = torch.accelerator.device_count(), not is_hidden and shutil.which("nvidia-smi") is not None
    gpus: tuple[Gpu, ...] = ()
    missed = []
    if num_usable or has_driver:
        try:
            # Not torch's own figures of memory: they need a context of our own on every GPU, which a full one refuses.
            query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used"]
            query.append("--format=csv,noheader,nounits")
            text = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
            gpus = parse_gpus(text, chosen)
        except (OSError, subprocess.SubprocessError) as error:
            missed.append(NotChecked("models and memory of the GPUs", f"nvidia-smi gave no answer: {error}"))
    return Gpus(gpus, num_usable, torch.version.cuda, has_driver, plan.devices), missed


def parse_gpus(text: str, chosen: str | None) -> tuple[Gpu, ...]:
    """Read the answer of ``nvidia-smi``, a GPU a line; those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        total, used = (int(cell) * MIB if cell.isdigit() else 0 for cell in row[3:])  # such as [N/A]
        found.append(Gpu(int(row[0]), row[1], row[2], total, used))
    if chosen is None:
        return tuple(found)
    # nvidia-smi knows nothing of the variable: it lists all, by PCI address.
    by_name = {str(gpu.index): gpu for gpu in found} | {gpu.uuid: gpu for gpu in found}
    return tuple(by_name[name.strip()] for name in chosen.split(",") if name.strip() in by_name)


@check(Gpus)
def gpu_unusable(facts: Gpus) -> Iterator[Problem]:
    """NVIDIA's driver is installed, but torch finds no GPU.

    The installed torch was built for CPUs, or its CUDA is newer than the driver. ``CUDA_VISIBLE_DEVICES`` set to
    nothing is on purpose, and not reported.

    Cost: Training runs on the CPU, tens of times slower.
    Fix: Install a torch that has CUDA, or update the driver to one that knows its version.
    """
    if facts.has_driver and facts.num_usable == 0:
        is_cpu_build = facts.torch_cuda is None
        why = "this torch was built without CUDA" if is_cpu_build else f"its CUDA {facts.torch_cuda} finds no driver"
        paste = "python -m pip install --upgrade --force-reinstall torch" if is_cpu_build else "nvidia-smi"
        yield Problem(SLOW, f"There is NVIDIA's driver, but torch can use no GPU: {why}.", paste)


@check(Gpus)
def gpus_too_few(facts: Gpus) -> Iterator[Problem]:
    """More ranks were asked for than torch finds GPUs.

    Cost: The run is refused at the start; with other launchers two ranks share a GPU, and NCCL fails or hangs.
    Fix: Ask for as many as there are.
    """
    if 0 < facts.num_usable < facts.num_wanted:
        ranks, usable = plural(facts.num_wanted, "rank"), plural(facts.num_usable, "GPU")
        found = f"{ranks} on this machine, but torch finds {usable}."
        yield Problem(HANG, found, f"lockstep run --devices {facts.num_usable} train.py")


@check(Gpus)
def gpus_differ(facts: Gpus) -> Iterator[Problem]:
    """The GPUs that the run would use differ in model or memory.

    ``--shares`` gives each device a part of the batch that fits its speed; ``fit`` weighs the parts so that the
    gradient stays exact.

    Cost: Every step takes as long as on the slowest, and the batch must fit the smallest.
    Fix: Train on those that are alike, or give the fast ones a larger part: --shares 2,1 in the order of the GPUs.
    """
    used = facts.gpus[: facts.num_wanted]
    kinds = [(gpu.memory_bytes, gpu.name) for gpu in used]
    if len(set(kinds)) > 1:
        alike = [str(gpu.index) for gpu, kind in zip(used, kinds, strict=True) if kind == max(kinds)]
        described = [f"GPU {gpu.index} {gpu.name} with {format_bytes(gpu.memory_bytes)}" for gpu in used]
        paste = f"export CUDA_VISIBLE_DEVICES={','.join(alike)}"
        yield Problem(SLOW, f"The GPUs are not alike: {listed(described)}.", paste)


@check(Gpus)
def gpu_busy(facts: Gpus) -> Iterator[Problem]:
    """Over a tenth of a GPU's memory is taken before the run begins.

    On a machine with a desktop that may be the screen; otherwise it is another job, or a process that a crash left.

    Cost: That memory is missing, and if the other process computes, all ranks wait for this one.
    Fix: Find out whose process it is, and end it or leave this GPU out.
    """
    for gpu in facts.gpus[: facts.num_wanted]:
        if gpu.used_bytes > _IN_USE * gpu.memory_bytes:
            used = f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)}"
            found = f"GPU {gpu.index} has {used} in use already."
            yield Problem(SLOW, found, "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv")


@dataclass(frozen=True)
class Cores:
    """Cores, and what is to run on them.

    Attributes:
        plan: The run.
        logical: That the machine has.
        usable: Cores' worth of time that this process and its children get, by affinity and the container's quota.
        physical: Without those that share one with another.
        threads: That each rank uses, if that is known.
        threads_from: Where that number comes from.
    """

    plan: Plan
    logical: int
    usable: float
    physical: int
    threads: int | None = None
    threads_from: str = "OMP_NUM_THREADS"

    @property
    def fair_threads(self) -> int:
        """Threads of a rank that use each physical core once."""
        # Two hardware threads of a core share its vector units: a second thread of matrix products gains nothing.
        return max(1, int(min(self.usable, self.physical) // self.plan.devices))

    @property
    def summary(self) -> str:
        """Cores, and threads of a rank."""
        threads = f"{self.threads_from}={self.threads}" if self.threads else "OMP_NUM_THREADS is not set"
        cores = f"{self.usable:g} of {plural(self.logical, 'core')} ({self.physical} physical)"
        return f"{cores} for {plural(self.plan.devices, 'rank')}; {threads}"


def read_cores(plan: Plan, environ: Mapping[str, str]) -> Cores:
    """Return what cores there are, and what is to run on them."""
    logical = psutil.cpu_count() or 1
    # torch and Python do not know of a container's quota.
    usable = min(len(os.sched_getaffinity(0)), env.cpu_quota() or logical)
    threads, source = None, "OMP_NUM_THREADS"
    if plan.devices == 1:  # launchers of several ranks set it themselves
        threads, source = torch.get_num_threads(), "torch.get_num_threads()"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # MKL goes by its own if both are set
        first = environ.get(name, "").split(",")[0].strip()  # may be a list, one number for each level of nesting
        if first.isdigit() and int(first) > 0:
            threads, source = int(first), name
    return Cores(plan, logical, usable, psutil.cpu_count(logical=False) or logical, threads, source)


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
    if threads is None or facts.plan.on_gpus:
        return
    if threads < facts.fair_threads and 2 * ranks * threads <= facts.usable:
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
    if ranks > facts.usable:
        paste = f"lockstep run --devices {max(1, int(facts.usable))} train.py"
    else:
        fitting = int(facts.usable // ranks) - 1
        paste = f"lockstep train TASK.py --workers {fitting}  # or num_workers={fitting} in a script"
    more_cores = f"srun --cpus-per-task={1 + workers} ...  # or this, under SLURM"
    yield Problem(SLOW, f"{plural(ranks, 'rank')}{loaders} for {facts.usable:g} cores.", f"{paste}\n{more_cores}")


# Of a process that has imported torch, before it has a model.
_RANK_BYTES = 250 * MIB

# Batches that each loader process loads before they are asked for; torch's own number.
_BATCHES_AHEAD = 2

# What NCCL shares in /dev/shm for each rank of a machine, about: buffers of every channel between processes.
_NCCL_BYTES = 64 * MIB

_DOCKER_DEFAULT_BYTES = 64 * MIB
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Memory:
    """Memory, and what is known of the need for it.

    Attributes:
        plan: The run.
        shm_bytes: Size of /dev/shm; 0 if there is none.
        shm_free_bytes: Of it.
        available_bytes: Memory that processes can get without swapping, within the limit of the container.
        task: The task, if there is one.
    """

    plan: Plan
    shm_bytes: int
    shm_free_bytes: int
    available_bytes: int
    task: TaskFacts | None = None

    @property
    def summary(self) -> str:
        """How much there is of both kinds."""
        shm = f"{format_bytes(self.shm_free_bytes)} free of {format_bytes(self.shm_bytes)}"
        return f"{format_bytes(self.available_bytes)} available; /dev/shm has {shm}"


def read_memory(plan: Plan, task: TaskFacts | None) -> Memory:
    """Return what memory there is, and what is known of the need for it."""
    total, free = shutil.disk_usage(_SHM)[::2] if _SHM.is_dir() else (0, 0)
    return Memory(plan, total, free, free_and_total_bytes()[0], task)


@check(Memory)
def shared_memory_small(facts: Memory) -> Iterator[Problem]:
    """Loader workers hand batches over in /dev/shm, and NCCL connects the processes of a machine there.

    Containers have 64 MiB of it by default, which is too little for any workers, and NCCL needs about as much for each
    rank. lockstep's own backend ``shm`` does not use it: its memory has no name.

    Cost: Loader workers die of a bus error (SIGBUS) when it is full, and NCCL fails to start with processes on one
        machine.
    Fix: Start the container with more, or make it larger.
    """
    ranks, workers = facts.plan.devices, facts.plan.workers or 0
    need = ranks * _NCCL_BYTES if facts.plan.on_gpus and ranks > 1 else 0
    if need > facts.shm_free_bytes or (workers > 0 and facts.shm_bytes <= _DOCKER_DEFAULT_BYTES):
        free = f"/dev/shm has {format_bytes(facts.shm_free_bytes)} free of {format_bytes(facts.shm_bytes)}"
        found = f"{free}, little for {plural(ranks, 'rank')} with {plural(workers, 'loader worker')} each."
        gib = max(1, -(-2 * need // 2**30))  # twice the need, rounded up
        paste = f"docker run --shm-size={gib}g ...  # or: sudo mount -o remount,size={gib}g /dev/shm"
        yield Problem(HANG, found, paste)


@check(Memory)
def memory_small(facts: Memory) -> Iterator[Problem]:
    """CPU ranks need more memory than there is, before activations.

    At least: 250 MiB for Python and torch each, the weights, as much again for gradients, and twice as much for Adam.
    Activations come on top. The limit of the container counts.

    Cost: The kernel kills a rank when memory is gone, and the run ends.
    Fix: Start fewer ranks, or divide the optimizer's state among them.
    """
    ranks, available = facts.plan.devices, facts.available_bytes
    rank_bytes = _RANK_BYTES + (facts.task.weight_bytes + 3 * facts.task.trained_bytes if facts.task else 0)
    need = ranks * rank_bytes
    if not facts.plan.on_gpus and need > available:
        least = f"{plural(ranks, 'rank')} need {format_bytes(need)} at least, before activations"
        fitting = max(1, available // rank_bytes)
        paste = f"lockstep train TASK.py --devices {fitting} --strategy ddp-zero1"
        yield Problem(HANG, f"{least}; {format_bytes(available)} are available.", paste)


# Files that a batch on its way from a worker keeps open: one for each of its tensors.
_FILES_OF_A_BATCH = 16


@dataclass(frozen=True)
class Limits:
    """How many files a process may have open, and what that may be raised to."""

    plan: Plan
    open_files: int
    open_files_hard: int


def read_limits(plan: Plan) -> Limits:
    """Return the limits of this process."""
    # Without a limit, the number is -1.
    soft, hard = (limit if limit >= 0 else 2**31 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return Limits(plan, soft, hard)


@check(Limits)
def open_files(facts: Limits) -> Iterator[Problem]:
    """A process may have too few files open.

    The estimate is 64 for Python and torch, 4 for each rank of the job, and 16 for each batch on its way from a worker:
    with torch's default way of sharing, each tensor in flight is an open file.

    Cost: A rank fails with 'Too many open files', perhaps only after hours.
    Fix: Raise the limit in the shell that starts the run; where only root can, let workers pass batches without files.
    """
    needed = 64 + 4 * facts.plan.world_size + (facts.plan.workers or 0) * _BATCHES_AHEAD * _FILES_OF_A_BATCH
    if needed > facts.open_files:
        wanted = min(65536, facts.open_files_hard)
        without_files = "torch.multiprocessing.set_sharing_strategy('file_system')  # at the top of the script"
        found = f"A process may have {plural(facts.open_files, 'file')} open; a rank of this run needs about {needed}."
        yield Problem(HANG, found, f"ulimit -n {wanted}" if wanted > facts.open_files else without_files)


# A file system that has not answered by then, as one over a broken network, is taken to be silent.
_SILENT_S = 3.0

# Checkpoints that lie there at a time: two that are kept, and the one being written.
_KEPT = 3


@dataclass(frozen=True)
class Disk:
    """The folder for checkpoints.

    Attributes:
        folder: As it was named.
        problem: Why nothing can be written there; ``None`` if it can.
        filesystem: Its kind, such as ``ext4``.
        free_bytes: Left there.
        checkpoint_bytes: Weights and optimizer state; 0 where they are not known from a task.
    """

    folder: str
    problem: str | None = None
    filesystem: str = ""
    free_bytes: int = 0
    checkpoint_bytes: int = 0


def read_disk(folder: str, checkpoint_bytes: int) -> Disk:
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
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    # Mounts lie within each other: the innermost has the folder.
    filesystem = next((mounted[str(one)] for one in (place, *place.parents) if str(one) in mounted), "")
    return Disk(folder, None, filesystem, free, checkpoint_bytes)


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
    needed = _KEPT * facts.checkpoint_bytes or 2**30
    if facts.problem is None and facts.free_bytes < needed:
        size = format_bytes(facts.checkpoint_bytes or 0)
        whose = f"{_KEPT} checkpoints of {size}" if facts.checkpoint_bytes else "even one model"
        found = f"{facts.folder} has {format_bytes(facts.free_bytes)} left, too little for {whose}."
        yield Problem(HANG, found, "df -h  # then: lockstep train TASK.py --checkpoint DIR")


# Variables, with the value that costs something.
_DEBUG_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "TRACE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
}


@dataclass(frozen=True)
class Switches:
    """The environment, as far as debugging switches are concerned."""

    environ: Mapping[str, str]


@check(Switches)
def debug_switch(facts: Switches) -> Iterator[Problem]:
    """An environment variable is set that helps to find faults and costs time.

    ``CUDA_LAUNCH_BLOCKING`` (the CPU waits for every kernel), ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (every collective is
    preceded by another), ``NCCL_P2P_DISABLE``, ``NCCL_SHM_DISABLE``, ``NCCL_IB_DISABLE`` (slower ways between GPUs),
    ``NCCL_DEBUG=TRACE``, ``PYTORCH_NO_CUDA_MEMORY_CACHING`` (every tensor is allocated by the driver).

    Cost: Each makes every step slower, some of them several times.
    Fix: Unset it, unless a fault is being searched for right now.
    """
    for name, costly in _DEBUG_SWITCHES.items():
        if facts.environ.get(name) == costly:
            yield Problem(SLOW, f"{name}={costly} is set.", f"unset {name}")
