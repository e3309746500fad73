"""The machine and the task: GPUs, cores, memory, checkpoint folder, debugging switches; batch, data, model."""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import IterableDataset

from lockstep.base import env
from lockstep.base.activity import format_bytes, in_time, one_line, plural
from lockstep.base.torch_internals import BatchNorm
from lockstep.study.common import MIB, measure_busy_cores
from lockstep.study.doctor.findings import NotChecked, Plan, Problem, Severity, check, cost, fix, listed, paste
from lockstep.telemetry.resources import free_and_total_bytes
from lockstep.train.task import Task, build_model, load_task

# The task, read with a time limit: the file is imported, and its model built without memory.

# Time limit for the task's own functions; the whole examination takes less than ten seconds.
LIMIT_S = 6.0

# Statistics of fewer samples are so noisy that accuracy suffers, as papers on batch norm found.
_FEW_FOR_STATISTICS = 16


@dataclass(frozen=True)
class TaskFacts:
    """What is known about a task without training it.

    Attributes:
        name: Its name.
        global_batch_size: Samples of a step on all devices.
        world_size: Number of devices.
        num_samples: Size of the data set; ``None`` for a stream, or if the data set was not built.
        batchnorms: Names of the BatchNorm layers that are not synchronised.
        weight_bytes: Size of parameters and buffers; 0 if the model was not built.
        trained_bytes: Size of the trained parameters.
    """

    name: str
    global_batch_size: int
    world_size: int
    num_samples: int | None = None
    batchnorms: Sequence[str] = ()
    weight_bytes: int = 0
    trained_bytes: int = 0

    @property
    def share(self) -> int:
        """Samples of each device in a step; the largest number if they differ."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def seen(self) -> dict[str, str]:
        """A line about batch, data and weights."""
        samples = "" if self.num_samples is None else f", {self.num_samples:,} samples"
        weights = f", {format_bytes(self.weight_bytes)} of weights" if self.weight_bytes else ""
        batch = f"global batch {self.global_batch_size}, {self.share} on each of {self.world_size}"
        return {"task": f"{self.name}: {batch}{samples}{weights}"}


def read_task(spec: str, plan: Plan, *, limit_s: float = LIMIT_S) -> tuple[TaskFacts | None, list[NotChecked]]:
    """Return the facts of the task that ``spec`` names, and what is unknown. Blocks at most ``limit_s``.

    Imports the file, and calls functions of the task, in another thread of this process.

    Raises:
        ConfigurationError: The file has no task, or fails; names the line.
    """
    fields: dict[str, Any] = {}
    unknown = dict.fromkeys(_PARTS, "it took too long")

    def read() -> None:
        task = load_task(spec)
        if task.prepare is not None:
            try:
                task.prepare()
            except Exception as error:
                unknown["Task.prepare"] = one_line(error)
        for what, facts_of in _PARTS.items():
            try:
                fields.update(facts_of(task))
                del unknown[what]
            except Exception as error:
                unknown[what] = one_line(error)

    with redirect_stdout(sys.stderr), suppress(TimeoutError):  # standard output is for the report, which may be JSON
        in_time(limit_s, read)
    missed = [NotChecked(what, because) for what, because in list(unknown.items())]
    return TaskFacts(world_size=plan.world_size, **fields) if fields else None, missed


def _own_facts(task: Task) -> dict[str, Any]:
    return {"name": task.name, "global_batch_size": task.global_batch_size}


class _NoDraws(TorchFunctionMode):
    """In this context, parameters get no normally distributed values.

    For these torch imports its compiler on the meta device, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_, nn.init.trunc_normal_):
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


def _model_facts(task: Task) -> dict[str, Any]:
    try:
        with torch.device("meta"), _NoDraws():  # no memory: the model may be larger than this machine
            model = build_model(task, keeps_meta=True)
    except Exception:  # a model that reads the values of its weights needs memory
        model = build_model(task)
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and not type(module).__name__.endswith("SyncBatchNorm")  # torch's or ours
    ]
    return {
        "batchnorms": names,
        "weight_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "trained_bytes": sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
    }


def _data_facts(task: Task) -> dict[str, Any]:
    dataset: Any = task.dataset()
    return {} if isinstance(dataset, IterableDataset) else {"num_samples": len(dataset)}


_PARTS = {"the task": _own_facts, "the model of the task": _model_facts, "the data set of the task": _data_facts}


@check(TaskFacts, Severity.NOTE)
@cost("The run differs from one on a single device.")
@fix("Synchronise the layers, train in reproducible mode, or use a norm that needs one sample only.")
@paste(
    "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)  # in the function of Task.model",
    "lockstep train TASK.py --reproducible {world_size}  # or this",
)
def batchnorm_not_synchronised(facts: TaskFacts) -> Iterator[Problem]:
    """BatchNorm normalises with the mean and variance of the rank's own samples.

    Statistics of fewer than 16 samples cost accuracy, and are reported as wrong. ``lockstep verify`` measures the
    difference between the runs.
    """
    if facts.batchnorms and facts.world_size > 1:
        layers = f"{plural(len(facts.batchnorms), 'BatchNorm layer')} ({listed(facts.batchnorms, 2)})"
        samples = f"the {plural(facts.share, 'sample')} of their own device, of {facts.global_batch_size}"
        severity = Severity.WRONG if facts.share < _FEW_FOR_STATISTICS else Severity.NOTE
        yield Problem(f"{layers} will normalise with {samples}.", severity=severity)


# The machine.

_NVIDIA_SMI_TIMEOUT_S = 4.0
# A larger part of a GPU's memory means that another job uses it; a desktop needs less.
_IN_USE = 0.1

# Memory of a process that has imported torch, without a model.
_RANK_BYTES = 250 * MIB
_SHM = Path("/dev/shm")
_DOCKER_DEFAULT_BYTES = 64 * MIB
# What NCCL needs in /dev/shm for each rank of a machine: buffers for every channel between processes.
_NCCL_BYTES = 64 * MIB

# A file system without an answer after this time, such as one over a broken network, is reported.
_DISK_TIMEOUT_S = 3.0
# Checkpoints in the folder at a time: two that are kept, and the one being written.
_KEPT = 3

# Environment variables, with the value that makes training slower.
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
class Gpu:
    """A GPU, as the driver describes it; 0 for what it does not report."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """This machine and the planned run; what has a default is read when it is made.

    Attributes:
        plan: The run.
        environ: The environment variables.
        task: The task, if there is one.
        gpus: The GPUs that the run may use, as the driver lists them.
        has_driver: Whether NVIDIA's driver is installed and CUDA_VISIBLE_DEVICES does not hide all GPUs.
        threads: Threads of each rank, if known.
        threads_from: What that number comes from.
        busy_cores: How many cores other programs kept busy for half a second.
        disk_problem: Why the checkpoint folder cannot be written; empty if it can.
        filesystem: Type of the checkpoint folder's file system, such as ``ext4``.
        free_bytes: Free space in the checkpoint folder.
        num_usable: How many GPUs torch can use.
        torch_cuda: The CUDA version that torch was built for, if any.
        logical: Logical cores of the machine.
        physical: Physical cores of the machine.
        usable: Cores that this process may use, by its affinity and the container's quota.
        available_bytes: Memory that processes can allocate without swapping, within the container's limit.
        shm_bytes: Size of /dev/shm; 0 without one.
        shm_free_bytes: Free space there.
    """

    plan: Plan
    environ: Mapping[str, str]
    task: TaskFacts | None
    gpus: Sequence[Gpu]
    has_driver: bool
    threads: int | None
    threads_from: str
    busy_cores: float
    disk_problem: str
    filesystem: str
    free_bytes: int
    num_usable: int = field(default_factory=torch.accelerator.device_count)
    torch_cuda: str | None = torch.version.cuda
    logical: int = field(default_factory=lambda: psutil.cpu_count() or 1)
    physical: int = field(default_factory=lambda: psutil.cpu_count(logical=False) or psutil.cpu_count() or 1)
    # torch ignores the container's quota.
    usable: float = field(default_factory=lambda: min(len(os.sched_getaffinity(0)), env.cpu_quota() or inf))
    available_bytes: int = field(default_factory=lambda: free_and_total_bytes()[0])
    shm_bytes: int = field(default_factory=lambda: shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0)
    shm_free_bytes: int = field(default_factory=lambda: shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0)

    @property
    def fair_threads(self) -> int:
        """Threads of a rank so that the ranks together use each physical core once."""
        # Hardware threads of one core share its vector units: a second thread of matrix products gains nothing.
        return max(1, int(min(self.usable, self.physical) // self.plan.devices))

    @property
    def seen(self) -> dict[str, str]:
        """A line each about devices, cores and memory."""
        models = ", ".join(dict.fromkeys(gpu.name for gpu in self.gpus))
        gpus = f"{plural(self.num_usable, 'GPU')} {models}".strip()
        threads = f"{self.threads_from}={self.threads}" if self.threads else "OMP_NUM_THREADS is not set"
        cores = f"{self.usable:g} of {plural(self.logical, 'core')} ({self.physical} physical)"
        shm = f"{_size(self.shm_free_bytes)} free of {_size(self.shm_bytes)}"
        return {
            "devices": gpus if self.num_usable else "no GPU that torch can use",
            "cores": f"{cores} for {plural(self.plan.devices, 'rank')}; {threads}",
            "memory": f"{format_bytes(self.available_bytes)} available; /dev/shm has {shm}",
        }


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes >= MIB else f"{num_bytes // 1024} KiB"


# Reading the machine.


def read_machine(plan: Plan, environ: Mapping[str, str], task: TaskFacts | None) -> tuple[Machine, list[NotChecked]]:
    """Return the state of this machine, and what could not be read. Blocks some seconds at most."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    # An empty value or -1 hides all GPUs, in order to train on the CPU.
    has_driver = (chosen is None or chosen.strip() not in ("", "-1")) and shutil.which("nvidia-smi") is not None
    gpus, missed = _ask_driver(chosen) if has_driver else ((), [])
    threads, source = _read_threads(plan, environ)
    busy_cores = 0.0 if plan.is_running else measure_busy_cores()
    disk = read_disk(plan.checkpoint)
    return Machine(plan, environ, task, gpus, has_driver, threads, source, busy_cores, *disk), missed


def _ask_driver(chosen: str | None) -> tuple[Sequence[Gpu], list[NotChecked]]:
    # Not torch's own memory figures: they need a context on every GPU, which a full GPU refuses.
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, errors="replace", timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
        return parse_gpus(done.stdout, chosen), []
    except (OSError, subprocess.SubprocessError) as error:
        return (), [NotChecked("models and memory of the GPUs", f"nvidia-smi gave no answer: {error}")]


def parse_gpus(text: str, chosen: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of ``nvidia-smi``, one per line; only those in ``CUDA_VISIBLE_DEVICES``, if set."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        total, used = (int(cell) * MIB if cell.isdigit() else 0 for cell in row[3:])  # may be [N/A]
        gpus.append(Gpu(int(row[0]), row[1], row[2], total, used))
    if chosen is None:
        return tuple(gpus)
    # nvidia-smi ignores the variable and lists all GPUs.
    by_name = {str(gpu.index): gpu for gpu in gpus} | {gpu.uuid: gpu for gpu in gpus}
    return tuple(by_name[name.strip()] for name in chosen.split(",") if name.strip() in by_name)


def _read_threads(plan: Plan, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the threads of each rank, if known, and where that number comes from."""
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # MKL uses its own if both are set
        first = environ.get(name, "").split(",")[0].strip()  # may be a list, with a number for each nesting level
        if first.isdigit() and int(first) > 0:
            return int(first), name
    # Launchers of several ranks set OMP_NUM_THREADS themselves.
    return (torch.get_num_threads(), "torch.get_num_threads()") if plan.devices == 1 else (None, "OMP_NUM_THREADS")


def read_disk(folder: str) -> tuple[str, str, int]:
    """Return why a folder cannot be written (empty if it can), its file system's type, and the free bytes."""
    place = Path(folder).expanduser().resolve()
    while not place.exists():  # the run would create the folder
        place = place.parent

    def write() -> int:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * MIB)
            os.fsync(file.fileno())  # over a network, quotas and lost servers are reported here only
        return shutil.disk_usage(place).free

    try:
        free = in_time(_DISK_TIMEOUT_S, write)
    except TimeoutError:
        return f"writing 1 MiB took longer than {_DISK_TIMEOUT_S:g} s", "", 0
    except OSError as error:
        return error.strerror or str(error), "", 0
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    # Mounts can be nested: the innermost one has the folder.
    return "", next((mounted[str(one)] for one in (place, *place.parents) if str(one) in mounted), ""), free


# GPUs.


@check(Machine, Severity.SLOW)
@cost("Training runs on the CPU, tens of times slower.")
@fix("Install a torch that has CUDA, or update the driver to one that supports torch's CUDA version.")
@paste("nvidia-smi  # shows the CUDA version of the driver", "python -m pip install --upgrade --force-reinstall torch")
def gpu_unusable(machine: Machine) -> Iterator[Problem]:
    """NVIDIA's driver is installed, but torch finds no GPU.

    The installed torch was built for CPUs, or its CUDA is newer than the driver. If ``CUDA_VISIBLE_DEVICES`` is empty,
    nothing is reported.
    """
    if machine.has_driver and machine.num_usable == 0:
        why = f"it finds no driver for its CUDA {machine.torch_cuda}" if machine.torch_cuda else "it has no CUDA"
        yield Problem(f"NVIDIA's driver is installed, but torch cannot use a GPU: {why}.")


@check(Machine, Severity.SLOW)
@cost("The run has less memory, and if the other process computes, all ranks wait for this one.")
@fix("Find the process, and end it or leave this GPU out.")
@paste("nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv")
def gpu_busy(machine: Machine) -> Iterator[Problem]:
    """Over a tenth of a GPU's memory is in use before the run begins.

    On a machine with a desktop that may be the screen; otherwise it is another job, or a process left by a crash.
    """
    for gpu in machine.gpus[: machine.plan.devices]:
        if gpu.used_bytes > _IN_USE * gpu.memory_bytes:
            used = f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)}"
            yield Problem(f"GPU {gpu.index} has {used} in use already.")


# Cores.


@check(Machine, Severity.SLOW)
@cost("CPU ranks, loader workers and threads that feed a GPU wait for a core; all ranks wait for the slowest.")
@fix("Stop the other programs, or reserve cores for the run (taskset, a scheduler, a control group).")
@paste("ps -eo pid,ni,pcpu,args --sort=-pcpu | head")
def cores_busy(machine: Machine) -> Iterator[Problem]:
    """Other programs keep at least a quarter of the machine's cores busy, measured for half a second.

    In a container, the cores and programs are those of the whole machine.
    """
    if machine.busy_cores >= max(0.5, machine.logical / 4):
        yield Problem(f"Other programs keep {machine.busy_cores:.1f} of {plural(machine.logical, 'core')} busy.")


@check(Machine, Severity.SLOW)
@cost("Operations take several times as long: at their end, all threads wait for one that has no core.")
@fix("Choose the number of threads so that all ranks together use each core once.")
@paste("export OMP_NUM_THREADS={fair_threads}")
def threads_too_many(machine: Machine) -> Iterator[Problem]:
    """All ranks together have more threads than cores.

    Each rank has as many as ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` says. Without these, a single process starts one
    for each core that it finds, although a container's quota may allow fewer.
    """
    ranks, total = machine.plan.devices, machine.plan.devices * (machine.threads or 0)
    if total > max(machine.usable, ranks):
        setting = f"{machine.threads_from}={machine.threads} on {plural(ranks, 'rank')}"
        yield Problem(f"{setting} are {total} threads for {machine.usable:g} cores.")


@check(Machine, Severity.SLOW)
@cost("The other cores are idle while the ranks compute.")
@fix("Choose the number of threads so that all ranks together use each core once, or start more ranks.")
@paste("export OMP_NUM_THREADS={fair_threads}")
def threads_too_few(machine: Machine) -> Iterator[Problem]:
    """CPU ranks use so few threads that at least half of the cores stay idle.

    torchrun sets ``OMP_NUM_THREADS=1`` unless it is set; ``lockstep run`` divides the cores among the ranks.
    """
    ranks, threads = machine.plan.devices, machine.threads or machine.fair_threads
    if threads < machine.fair_threads and 2 * ranks * threads <= machine.usable and not machine.plan.on_gpus:
        setting = f"{machine.threads_from}={threads} on {plural(ranks, 'rank')}"
        yield Problem(f"{setting} use {ranks * threads} of {machine.usable:g} cores.")


@check(Machine, Severity.SLOW)
@cost("The processes take turns, and at each collective all ranks wait for the slowest.")
@fix("Start fewer, or request more cores from the scheduler; SLURM's default is one for each task.")
def processes_over_cores(machine: Machine) -> Iterator[Problem]:
    """Ranks and their loader workers are more processes than this process has cores.

    The cores are the ones that an affinity mask (``taskset``, a scheduler) and the container's quota allow.
    """
    ranks, workers, usable = machine.plan.devices, machine.plan.workers or 0, machine.usable
    processes = ranks * (1 + workers)
    if processes > max(1.0, usable):  # a quota may be below one core
        loaders = f" with {plural(workers, 'loader worker')} each are {processes} processes" if workers else ""
        fair = min(ranks, max(1, int(usable)))
        paste = f"lockstep train TASK.py --devices {fair} --workers {max(1, int(usable)) // fair - 1}"
        paste += f"\nsrun --cpus-per-task={1 + workers} ...  # or this, under SLURM"
        yield Problem(f"{plural(ranks, 'rank')}{loaders} for {usable:g} cores.", paste=paste)


# Memory.


@check(Machine, Severity.HANG)
@cost("Loader workers end with a bus error (SIGBUS) when it is full, and NCCL fails to start.")
@fix("Start the container with more shared memory, make /dev/shm larger, or use no loader workers.")
def shared_memory_small(machine: Machine) -> Iterator[Problem]:
    """/dev/shm is too small for loader workers, which pass batches there, or for NCCL between processes of a machine.

    The default of containers is 64 MiB, which is too little for workers; NCCL needs about as much for each rank. If the
    number of workers is unknown, this is a note. lockstep's own backend ``shm`` does not use /dev/shm.
    """
    ranks, workers = machine.plan.devices, machine.plan.workers
    need = ranks * _NCCL_BYTES if machine.plan.on_gpus and ranks > 1 else 0
    is_default = machine.shm_bytes <= _DOCKER_DEFAULT_BYTES and workers != 0
    if need > machine.shm_free_bytes or is_default:
        workers_text = "loader workers" if workers is None else f"{plural(workers, 'loader worker')} each"
        free = f"{_size(machine.shm_free_bytes)} free of {_size(machine.shm_bytes)}"
        gib = max(1, -(-2 * need // 2**30))  # twice the need, rounded up
        yield Problem(
            f"/dev/shm has {free}, which is too little for {plural(ranks, 'rank')} with {workers_text}.",
            severity=Severity.NOTE if workers is None and need <= machine.shm_free_bytes else Severity.HANG,
            paste=f"docker run --shm-size={gib}g ...  # or: sudo mount -o remount,size={gib}g /dev/shm",
        )


@check(Machine, Severity.HANG)
@cost("The kernel kills a rank when no memory is left, and the run ends.")
@fix("Start fewer ranks, or shard the optimizer state.")
def memory_small(machine: Machine) -> Iterator[Problem]:
    """CPU ranks need more memory than is available, even without activations.

    The estimate for each rank is 250 MiB for Python and torch, the weights, as much again for gradients, and twice as
    much for Adam. The container's limit counts.
    """
    ranks, available, task = machine.plan.devices, machine.available_bytes, machine.task
    rank_bytes = _RANK_BYTES + (task.weight_bytes + 3 * task.trained_bytes if task else 0)
    if not machine.plan.on_gpus and (need := ranks * rank_bytes) > available:
        least = f"{plural(ranks, 'rank')} need at least {format_bytes(need)}, before activations"
        paste = f"lockstep train TASK.py --devices {max(1, available // rank_bytes)} --strategy ddp-zero1"
        yield Problem(f"{least}; {format_bytes(available)} are available.", paste=paste)


# The checkpoint folder, and the environment.


@check(Machine, Severity.HANG)
@cost("The run ends when it writes its first checkpoint; checkpoints in memory are lost when the machine restarts.")
@fix("Choose a folder on a disk that can be written.")
@paste("lockstep train TASK.py --checkpoint ~/checkpoints")
def checkpoint_folder(machine: Machine) -> Iterator[Problem]:
    """The checkpoint folder cannot be written, does not respond, or is in memory."""
    if machine.disk_problem:
        yield Problem(f"{machine.plan.checkpoint} cannot be written: {machine.disk_problem}.")
    elif machine.filesystem in ("tmpfs", "ramfs"):
        yield Problem(f"{machine.plan.checkpoint} is in memory ({machine.filesystem}).", severity=Severity.WRONG)


@check(Machine, Severity.HANG)
@cost("The run ends when a checkpoint does not fit.")
@fix("Free some space, or choose another folder.")
@paste("df -h  # then: lockstep train TASK.py --checkpoint DIR")
def disk_full(machine: Machine) -> Iterator[Problem]:
    """The checkpoint folder has no room for three checkpoints; if their size is unknown, less than 1 GiB.

    Two checkpoints are kept while the next is written.
    """
    # The weights, and an optimizer state such as Adam's: twice the trained weights.
    size = machine.task.weight_bytes + 2 * machine.task.trained_bytes if machine.task else 0
    if not machine.disk_problem and machine.free_bytes < (_KEPT * size or 2**30):
        what = f"{_KEPT} checkpoints of {format_bytes(size)}" if size else "a model"
        free = f"{machine.plan.checkpoint} has {format_bytes(machine.free_bytes)} left"
        yield Problem(f"{free}, which is too little for {what}.")


@check(Machine, Severity.SLOW)
@cost("Each makes every step slower, some of them several times.")
@fix("Unset it, unless you are debugging.")
def debug_switch(machine: Machine) -> Iterator[Problem]:
    """An environment variable for debugging is set that makes training slower.

    ``CUDA_LAUNCH_BLOCKING`` (the CPU waits for every kernel), ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (an additional
    collective before every collective), ``NCCL_P2P_DISABLE``, ``NCCL_SHM_DISABLE``, ``NCCL_IB_DISABLE`` (slower
    transports between GPUs), ``NCCL_DEBUG=TRACE``, ``PYTORCH_NO_CUDA_MEMORY_CACHING`` (the driver allocates every
    tensor).
    """
    for name, costly in _DEBUG_SWITCHES.items():
        if machine.environ.get(name) == costly:
            yield Problem(f"{name}={costly} is set.", paste=f"unset {name}")
