"""The environment of this process: its rank, cores, sockets and file systems. Imports the standard library only."""

from __future__ import annotations

import contextlib
import ipaddress
import multiprocessing.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from zlib import crc32

from lockstep.errors import ConfigurationError

# --- SLURM's compressed notations: ``gpu[003-005,9],login`` for hosts and ``4(x2),1`` for tasks on each node

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FIRST_HOST = re.compile(r"((?:[^\[\],]|\[\d+(?:[-,][^\[\]]*)?\])+)(?:,.*)?")


def first_host(hosts: str, *, variable: str) -> str:
    """Return the first host of a SLURM host list.

    Args:
        hosts: As in SLURM_NODELIST.
        variable: The environment variable that it came from, for the message.

    Raises:
        ConfigurationError: The list has no first host.
    """
    match = _FIRST_HOST.fullmatch(hosts)
    if match is None:
        raise _unreadable(variable, hosts)
    # Of "003-005,9" the first is 003: as text, since the zeros are part of the name.
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def tasks_on_node(layout: str, node: int, *, variable: str) -> int:
    """Return the number of tasks on the node of index ``node`` from SLURM's count per node.

    Raises:
        ConfigurationError: The notation cannot be read, or has fewer nodes than that.
    """
    counts: list[int] = []
    for part in layout.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise _unreadable(variable, layout)
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ConfigurationError(
            f"{variable}={layout} counts {len(counts)} nodes, but SLURM_NODEID={node}.\n"
            "Start the ranks with srun, so that these variables belong to the same step."
        )
    return counts[node]


def _unreadable(variable: str, value: str) -> ConfigurationError:
    return ConfigurationError(
        f"{variable}={value!r} cannot be read.\nSet MASTER_ADDR to the host of rank 0 yourself, and unset {variable}."
    )


# --- The rank of this process

# The port that torchrun uses when none is given.
DEFAULT_MASTER_PORT = 29500

# The range of ports derived from a job's id: below those that Linux uses for outgoing connections (32768 and up).
_MASTER_PORT_RANGE = range(20000, 32000)


class Launcher(Enum):
    """What started this process."""

    NONE = "none"
    TORCHRUN = "torchrun"
    ENV = "env://"
    OPEN_MPI = "Open MPI"
    PMI = "PMI"
    SLURM = "SLURM"


# The variables with rank, world size, local rank and local world size. OMPI_COMM_WORLD_NODE_RANK is this process's
# index on its node, not the node's index.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Set by Kubernetes for the pods of an indexed Job; the manifest must set the rest.
_POD_INDEX = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True)
class RankEnv:
    """The place of this process in the job, as its launcher wrote it into the environment.

    Attributes:
        master_addr: Where the ranks meet; ``None`` only in a world of one.
        master_port: As ``master_addr``.
        launcher: ``TORCHRUN`` also stands for the same variables set by hand. With ``ENV``, as in the pods of a
            PyTorchJob, they do not say which ranks share a machine: each counts as alone on its own until they meet.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str | None
    master_port: int | None
    launcher: Launcher

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankEnv:
        """Read the place of this process from ``environ``.

        The first launcher whose variables are present counts: torchrun, Open MPI, MPICH or Intel MPI, SLURM, an indexed
        Job of Kubernetes; with none of them it is a world of one.

        Raises:
            ConfigurationError: A variable is missing, is not an integer, or contradicts another; names it.
        """
        env = {name: value.strip() for name, value in environ.items() if value.strip()}
        if "RANK" in env:
            return _from_torchrun(env, "RANK")
        if _OPEN_MPI[0] in env:
            rank_env = _from_mpi(env, Launcher.OPEN_MPI, *_OPEN_MPI)
        elif "PMI_RANK" in env and ("MPI_LOCALRANKID" in env or "SLURM_PROCID" not in env):
            rank_env = _from_mpi(env, Launcher.PMI, *_PMI)
        elif "SLURM_PROCID" in env and not _is_batch_shell(env):
            rank_env = _from_slurm(env)
        elif _POD_INDEX in env and env.get("WORLD_SIZE", "1") != "1":
            return _from_torchrun(env, _POD_INDEX)
        else:
            rank_env = cls(0, 0, 1, 1, 0, None, None, Launcher.NONE)
            if env.get("PET_NNODES", "1") not in ("1", "1:1"):
                raise _not_started(f"PET_NNODES={env['PET_NNODES']} asks for several machines, but RANK is not set")
            if "LOCAL_RANK" in env or env.get("WORLD_SIZE", "1") != "1":
                raise ConfigurationError(
                    f"{'LOCAL_RANK' if 'LOCAL_RANK' in env else 'WORLD_SIZE'} is set, but RANK is not.\n"
                    "Start the ranks with `lockstep run`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
                    "MASTER_PORT for each."
                )
        for name, value in (("WORLD_SIZE", rank_env.world_size), ("LOCAL_RANK", rank_env.local_rank)):
            if name in env and _integer(env, name) != value:
                raise ConfigurationError(
                    f"{name}={env[name]} contradicts what {rank_env.launcher.value} says ({value}).\n"
                    f"Unset {name}, or start the ranks with as many tasks as it says."
                )
        return rank_env

    def checked(self, rank_name: str, size_name: str, local_rank_name: str, local_size_name: str) -> RankEnv:
        """Return this if its numbers fit each other; the names are the variables to blame.

        Raises:
            ConfigurationError: They do not.
        """
        if not 1 <= self.local_world_size <= self.world_size:
            raise ConfigurationError(
                f"{local_size_name} says {self.local_world_size} ranks on this machine, but {size_name} says "
                f"{self.world_size} in all.\nCorrect one of the two: the first lies between 1 and the second."
            )
        ranks = (rank_name, self.rank, size_name, self.world_size)
        local_ranks = (local_rank_name, self.local_rank, local_size_name, self.local_world_size)
        for name, rank, of, size in (ranks, local_ranks):
            if not 0 <= rank < size:
                raise ConfigurationError(
                    f"{name}={rank} is out of range: {of} says {size} ranks.\nRanks count from 0 to {size - 1}."
                )
        return self


def machine_timeout_s() -> float:
    """Return after how long without a sign of life a machine counts as lost."""
    return float(os.environ.get("LOCKSTEP_MACHINE_TIMEOUT_S", 5.0))


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine's loopback interface, without asking a name server."""
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def _from_torchrun(env: Mapping[str, str], rank_name: str) -> RankEnv:
    rank, world_size = _integer(env, rank_name), _integer(env, "WORLD_SIZE")
    addr, port = env.get("MASTER_ADDR"), _port(env)
    if world_size > 1 and (addr is None or port is None):
        raise ConfigurationError(
            f"{rank_name} and WORLD_SIZE are set, but {'MASTER_ADDR' if addr is None else 'MASTER_PORT'} is not.\n"
            "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on every rank."
        )
    names = (rank_name, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    one_machine = world_size <= 1 or (addr is not None and is_loopback(addr))
    if not one_machine and "LOCAL_RANK" not in env and "LOCAL_WORLD_SIZE" not in env:
        # A PyTorchJob with several ranks in a pod starts one process in each.
        if env.get("PET_NNODES", str(world_size)) != str(world_size):
            pods = f"the {env['PET_NNODES']} pods of PET_NNODES"
            raise _not_started(f"WORLD_SIZE={world_size} ranks are not one in each of {pods}")
        return RankEnv(rank, 0, world_size, 1, rank, addr, port, Launcher.ENV).checked(*names)
    # With ranks on several machines, each needs its index on its own.
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", default=world_size if one_machine else None)
    local_rank = _integer(env, "LOCAL_RANK", default=rank if one_machine else None)
    node_name = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
    node_rank = _integer(env, node_name, default=rank // max(local_world_size, 1))
    rank_env = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, Launcher.TORCHRUN)
    return rank_env.checked(*names)


def _not_started(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{reason}: torchrun has not started the ranks.\n"
        "Start this command with torchrun or `lockstep run`, such as: lockstep run -m lockstep train TASK.py"
    )


def _from_mpi(env: Mapping[str, str], launcher: Launcher, *names: str) -> RankEnv:
    rank, world_size, local_rank, local_world_size = (_integer(env, name) for name in names)
    addr = env.get("MASTER_ADDR")
    if addr is None and world_size != local_world_size:
        raise ConfigurationError(
            "MASTER_ADDR is not set, and mpirun does not say where rank 0 runs.\n"
            "Pass it on: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ... "
            "(MPICH and Intel MPI: -genv MASTER_ADDR <host>)."
        )
    job = env.get("PMIX_NAMESPACE") if launcher is Launcher.OPEN_MPI else None
    port = _port(env) or (_port_of_job(job) if job else DEFAULT_MASTER_PORT)
    node_rank = rank // max(local_world_size, 1)
    rank_env = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr or "127.0.0.1", port, launcher)
    return rank_env.checked(*names)


def _from_slurm(env: Mapping[str, str]) -> RankEnv:
    # Those of a step count before those of the whole allocation.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    layout_name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_TASKS_PER_NODE"
    hosts_name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_NODELIST"
    rank, world_size = _integer(env, "SLURM_PROCID"), _integer(env, size_name)
    local_rank, node_rank = _integer(env, "SLURM_LOCALID"), _integer(env, "SLURM_NODEID")
    # In a step of several components of a heterogeneous job, srun sorts hosts and their tasks by name, but numbers
    # tasks and nodes by component.
    first_group = "SLURM_JOB_NODELIST_HET_GROUP_0"
    groups = [env[name] for name in env if name.startswith(first_group[:-1])]
    is_het = bool(groups) and env.get(hosts_name) not in groups
    hosts_name = first_group if is_het else hosts_name
    addr = env.get("MASTER_ADDR") or first_host(_value(env, hosts_name), variable=hosts_name)
    # Two steps of one job may run at the same time, so the step is included.
    port = _port(env) or _port_of_job(f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}")
    if is_het:
        return RankEnv(rank, 0, world_size, 1, rank, addr, port, Launcher.ENV)
    local_world_size = tasks_on_node(_value(env, layout_name), node_rank, variable=layout_name)
    rank_env = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, Launcher.SLURM)
    return rank_env.checked("SLURM_PROCID", size_name, "SLURM_LOCALID", layout_name)


def _is_batch_shell(env: Mapping[str, str]) -> bool:
    """Return whether this is the shell of an allocation, where SLURM_PROCID=0 does not mean that srun started us."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step in _SHELL_STEPS:
        return True
    return step is None and (env.get("ENVIRONMENT") == "BATCH" or env.get("SLURM_JOB_NAME") in ("bash", "interactive"))


# SLURM's own steps, from its slurm_protocol_defs.h: of the shell of salloc, and of a batch script.
_SHELL_STEPS = ("4294967290", "4294967291")
# Of Linux's first namespace, in which all processes are visible.
_PID_NAMESPACE = "pid:[4026531836]"


def check_step() -> None:
    """Check that srun has started this process, if SLURM says so: in a shell that srun started the variables stay.

    Raises:
        ConfigurationError: No other task of its step runs on this machine.
    """
    names = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"
    environs = []
    for folder in (Path("/proc/self"), *Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            variables = os.fsdecode((folder / "environ").read_bytes()).split("\0")
            environ = dict(variable.partition("=")[::2] for variable in variables)
            environs.append([environ.get(name) for name in names])
    job, step, rank = environs[0] if environs else (None, None, None)
    # A process that was forked may have variables that are not there, as may the processes that it looks for.
    if job is None or rank is None or os.readlink("/proc/self/ns/pid") != _PID_NAMESPACE:
        return
    if not any(other[:2] == [job, step] and other[2] not in (None, rank) for other in environs):
        raise ConfigurationError(
            f"SLURM says that this process is task {rank} of several of job {job}, but no other one runs on this "
            "machine: srun has not started it, or the others have ended.\n"
            "Start all ranks with srun, as in: srun python train.py. For a single process in the shell of a step, "
            "unset SLURM_PROCID."
        )


def _port_of_job(job: str) -> int:
    """Return a port that is the same for every rank of ``job``, without communication."""
    return _MASTER_PORT_RANGE[crc32(job.encode()) % len(_MASTER_PORT_RANGE)]


def _value(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise ConfigurationError(
            f"{name} is not set, although other variables of the same launcher are.\n"
            f"Start every rank through the launcher itself: set {name}, or use `lockstep run`."
        )
    return env[name]


def _integer(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _value(env, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number.\nSet {name} to one, or unset it.") from None


def _port(env: Mapping[str, str]) -> int | None:
    if "MASTER_PORT" not in env:
        return None
    port = _integer(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"MASTER_PORT={port} is not a port number.\nSet it to a free port from 1 to 65535.")
    return port


# The variable with the address of the launcher's store, if torch's process groups shall meet there.
LAUNCHER_STORE = "LOCKSTEP_LAUNCHER_STORE"
# torchrun's own: whether the launcher serves a store at MASTER_ADDR, else rank zero does.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


# --- Control groups, of both versions

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def read_groups(controller: str, file: str, root: Path | None = None, cgroups: Path | None = None) -> list[str]:
    """Return the texts of ``file``, such as ``cpu.max``, of this process's control groups, from the innermost on.

    Args:
        controller: The hierarchy, in version 1 of control groups; version 2 has one hierarchy for all controllers.
        file: One that not every group has.
        root: The mount point of control groups.
        cgroups: The file that lists the groups of this process.
    """
    root, cgroups = root or CGROUP_ROOT, cgroups or OWN_CGROUPS
    folders, texts = [], []
    # Groups are named as their creator likes, for example in Latin-1.
    for line in filter(None, os.fsdecode(cgroups.read_bytes()).split("\n") if cgroups.exists() else ()):
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            # Inside a container the path may be that of the host, which does not exist here: then the root applies.
            inner = (Path(path) / "x").relative_to("/").parents
            bases = [root] if names == "" else [root / names, root / controller]
            folders += [base / part for base in bases for part in inner]
    for folder in dict.fromkeys([*folders, root]):
        with contextlib.suppress(OSError):
            texts.append((folder / file).read_text(errors="replace").strip())
    return texts


def cpu_quota(root: Path | None = None, cgroups: Path | None = None) -> float | None:
    """Return the lowest CPU quota of this process's control groups, in cores; None without a quota."""
    texts = [text.split() for text in read_groups("cpu", "cpu.max", root, cgroups)]
    periods = read_groups("cpu", "cpu.cfs_period_us", root, cgroups)
    texts += map(list, zip(read_groups("cpu", "cpu.cfs_quota_us", root, cgroups), periods, strict=False))
    # Without a quota the second version says "max", the first one -1.
    return min((int(quota) / int(period) for quota, period in texts if quota.isdecimal()), default=None)


def throttled_s(root: Path | None = None, cgroups: Path | None = None) -> float:
    """Return how long quotas have throttled this process's control groups so far, in core-seconds."""
    times_s = [0.0]
    for text in read_groups("cpu", "cpu.stat", root, cgroups):
        stat = dict(line.split() for line in text.splitlines())
        # Microseconds in the second version, nanoseconds in the first.
        times_s.append(int(stat.get("throttled_usec", 0)) / 1e6 + int(stat.get("throttled_time", 0)) / 1e9)
    return max(times_s)  # a group's time includes that of its subgroups


def usable_cores() -> int:
    """Return how many logical cores this process may keep busy, by its CPU affinity and its quota."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


# --- Sockets of loader processes
#
# A tensor is sent as an open file, for which the loader process listens on a socket in a folder that `multiprocessing`
# creates in the folder for temporary files. A socket's path must not be longer than 107 bytes. If it is, a background
# thread prints the error, and the rank waits for its first batch forever. Newer versions of Python choose a shorter
# path themselves.

_MOST_BYTES = 107


def check_socket_folder() -> None:
    """Check that loader processes can create their sockets in the folder of this process.

    Raises:
        ConfigurationError: The name of the folder is too long.
    """
    # The folder that the launcher has chosen for its ranks, or a new one in the folder for temporary files.
    folder = multiprocessing.util.get_temp_dir()
    is_python_careful = hasattr(multiprocessing.util, "_SUN_PATH_MAX")
    if not is_python_careful and len(os.fsencode(f"{folder}/listener-xxxxxxxx")) > _MOST_BYTES:
        raise ConfigurationError(
            "The name of the folder for temporary files is too long for loader processes, which pass tensors through "
            f"sockets in it: {folder}\n"
            "Set a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
        )


def file_system_of(url: str) -> Any:
    """Return the file system of fsspec for a URL such as ``s3://bucket/run``.

    Raises:
        ConfigurationError: It cannot be used, for example because the package for it is not installed.
    """
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)[0]
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{url} is in an object store that cannot be used here: {error}.\n"
            "Install its package on every machine, such as s3fs for s3:// or gcsfs for gs://."
        ) from error


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as by ``>&-``; Python makes such a stream None.

    Otherwise the next file that is opened gets the stream's number, and child processes write into that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            stream = open(number, mode)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def process_tree(pid: int, *, of_all_threads: bool = True) -> Iterator[int]:
    """Yield a process and its descendants; processes started by main threads only are found faster."""
    yield pid
    task = Path(f"/proc/{pid}/task")
    for path in task.glob("*/children") if of_all_threads else [task / str(pid) / "children"]:
        with contextlib.suppress(OSError):
            for child in path.read_text(errors="replace").split():
                yield from process_tree(int(child), of_all_threads=of_all_threads)
