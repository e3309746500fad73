"""Where this process runs: its rank, the cores it may use, and room for its sockets. Standard library only."""

from __future__ import annotations

import contextlib
import ipaddress
import multiprocessing.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
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

# Where ports derived from a job's id lie: below what Linux hands out to outgoing connections (32768 and up).
_MASTER_PORT_RANGE = range(20000, 32000)


class Launcher(Enum):
    """What started this process."""

    NONE = "none"
    TORCHRUN = "torchrun"
    OPEN_MPI = "Open MPI"
    PMI = "PMI"
    SLURM = "SLURM"


@dataclass(frozen=True)
class RankEnv:
    """The place of this process in the job, as its launcher wrote it into the environment.

    Attributes:
        master_addr: Where the ranks meet; ``None`` only in a world of one.
        master_port: As ``master_addr``.
        launcher: ``TORCHRUN`` also stands for the same variables set by hand.
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

        The first launcher whose variables are present counts: torchrun, Open MPI, MPICH or Intel MPI, SLURM; with none
        of them it is a world of one.

        Raises:
            ConfigurationError: A variable is missing, is no whole number, or contradicts another; names it.
        """
        env = {name: value.strip() for name, value in environ.items() if value.strip()}
        if "RANK" in env:
            return _from_torchrun(env)
        if "OMPI_COMM_WORLD_RANK" in env:
            # OMPI_COMM_WORLD_NODE_RANK is this process's index on its node, not the node's index.
            found = _from_mpi(env, Launcher.OPEN_MPI, *(f"OMPI_COMM_WORLD_{name}" for name in _OPEN_MPI))
        elif "PMI_RANK" in env and ("MPI_LOCALRANKID" in env or "SLURM_PROCID" not in env):
            found = _from_mpi(env, Launcher.PMI, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        elif "SLURM_PROCID" in env and not _is_batch_shell(env):
            found = _from_slurm(env)
        else:
            found = cls(0, 0, 1, 1, 0, None, None, Launcher.NONE)
            if "LOCAL_RANK" in env or env.get("WORLD_SIZE", "1") != "1":
                raise ConfigurationError(
                    f"{'LOCAL_RANK' if 'LOCAL_RANK' in env else 'WORLD_SIZE'} is set, but RANK is not.\n"
                    "Start the ranks with `lockstep run`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
                    "MASTER_PORT for each."
                )
        for name, value in (("WORLD_SIZE", found.world_size), ("LOCAL_RANK", found.local_rank)):
            if name in env and _integer(env, name) != value:
                raise ConfigurationError(
                    f"{name}={env[name]} contradicts what {found.launcher.value} says ({value}).\n"
                    f"Unset {name}, or start the ranks with as many tasks as it says."
                )
        return found


_OPEN_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine's loopback interface, without asking a name server."""
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _from_torchrun(env: Mapping[str, str]) -> RankEnv:
    rank, world_size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    addr, port = env.get("MASTER_ADDR"), _port(env)
    if world_size > 1 and (addr is None or port is None):
        raise ConfigurationError(
            f"RANK and WORLD_SIZE are set, but {'MASTER_ADDR' if addr is None else 'MASTER_PORT'} is not.\n"
            "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on every rank."
        )
    if world_size == 1 or (addr is not None and is_loopback(addr)):
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", default=world_size)
        local_rank = _integer(env, "LOCAL_RANK", default=rank)
    else:
        hint = "With ranks on several machines, each needs its index on its own machine"
        local_rank = _integer(env, "LOCAL_RANK", hint=hint)
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", hint=hint.replace("its index", "the number of ranks"))
    node_rank = next((_integer(env, name) for name in ("GROUP_RANK", "NODE_RANK") if name in env), None)
    if node_rank is None:
        node_rank = rank // max(local_world_size, 1)
    found = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, Launcher.TORCHRUN)
    return _checked(found, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")


def _from_mpi(
    env: Mapping[str, str], launcher: Launcher, rank_name: str, size_name: str, local_name: str, local_size_name: str
) -> RankEnv:
    rank, world_size = _rank_and_size(env, rank_name, size_name)
    local_rank, local_world_size = _integer(env, local_name), _integer(env, local_size_name)
    addr, port = env.get("MASTER_ADDR"), _port(env)
    if addr is None and world_size != local_world_size:
        raise ConfigurationError(
            "MASTER_ADDR is not set, and mpirun does not tell where rank 0 runs.\n"
            "Pass it on: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ... "
            "(MPICH and Intel MPI: -genv MASTER_ADDR <host>)."
        )
    jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    job = next((env[name] for name in jobs if name in env and launcher is Launcher.OPEN_MPI), None)
    port = port or (_port_of_job(job) if job else DEFAULT_MASTER_PORT)
    node_rank = rank // max(local_world_size, 1)
    found = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr or "127.0.0.1", port, launcher)
    return _checked(found, local_name, local_size_name, size_name)


def _from_slurm(env: Mapping[str, str]) -> RankEnv:
    def name_of(*names: str) -> str:
        """Return the first variable that is set: those of a step count before those of the whole allocation."""
        return next((name for name in names if name in env), names[-1])

    size_name = name_of("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    layout_name = name_of("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    hosts_name = name_of("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    rank, world_size = _rank_and_size(env, "SLURM_PROCID", size_name)
    local_rank, node_rank = _integer(env, "SLURM_LOCALID"), _integer(env, "SLURM_NODEID")
    if layout_name in env:
        local_world_size = tasks_on_node(env[layout_name], node_rank, variable=layout_name)
    else:
        num_nodes = _integer(env, name_of("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), default=1)
        local_world_size = _integer(env, "SLURM_NTASKS_PER_NODE", default=-(-world_size // max(num_nodes, 1)))
    addr = env.get("MASTER_ADDR")
    if addr is None and hosts_name in env:
        addr = first_host(env[hosts_name], variable=hosts_name)
    elif addr is None and world_size == local_world_size:
        addr = "127.0.0.1"
    elif addr is None:
        raise ConfigurationError(
            "SLURM_PROCID is set, but neither SLURM_NODELIST nor MASTER_ADDR says where rank 0 runs.\n"
            "Start the ranks with srun, or export MASTER_ADDR=<host of rank 0>."
        )
    # Two steps of one job may run side by side, so the step counts too.
    job = f"{env.get(name_of('SLURM_JOB_ID', 'SLURM_JOBID'), '')}.{env.get('SLURM_STEP_ID', '')}"
    port = _port(env) or _port_of_job(job)
    found = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, Launcher.SLURM)
    return _checked(found, "SLURM_LOCALID", layout_name, size_name)


def _is_batch_shell(env: Mapping[str, str]) -> bool:
    """Return whether this is the shell of an allocation, where SLURM_PROCID=0 does not mean that srun started us."""
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    return not in_step and (env.get("ENVIRONMENT") == "BATCH" or env.get("SLURM_JOB_NAME") in ("bash", "interactive"))


def _port_of_job(job: str) -> int:
    """Return a port that every rank of ``job`` finds alike, without communication."""
    return _MASTER_PORT_RANGE[crc32(job.encode()) % len(_MASTER_PORT_RANGE)]


def _checked(found: RankEnv, local_rank_name: str, local_size_name: str, size_name: str) -> RankEnv:
    """Return ``found`` if its local numbers fit each other and the world; the names are the variables to blame."""
    if not 1 <= found.local_world_size <= found.world_size:
        raise ConfigurationError(
            f"{local_size_name} says {found.local_world_size} ranks on this machine, but {size_name} says "
            f"{found.world_size} in all.\nCorrect one of the two: the first lies between 1 and the second."
        )
    if not 0 <= found.local_rank < found.local_world_size:
        raise ConfigurationError(
            f"{local_rank_name}={found.local_rank} is out of range: {local_size_name} says "
            f"{found.local_world_size} ranks on this machine.\n"
            f"Local ranks count from 0 to {found.local_world_size - 1}."
        )
    if found.node_rank < 0:
        raise ConfigurationError(
            f"The node rank is {found.node_rank}.\nNodes count from 0: check GROUP_RANK, NODE_RANK."
        )
    return found


def _rank_and_size(env: Mapping[str, str], name: str, size_name: str) -> tuple[int, int]:
    rank, size = _integer(env, name), _integer(env, size_name)
    if size < 1:
        raise ConfigurationError(f"{size_name}={size} is no world size.\nSet it to the number of processes of the job.")
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"{name}={rank} is out of range for {size_name}={size}.\nRanks count from 0 to {size - 1}."
        )
    return rank, size


def _integer(env: Mapping[str, str], name: str, *, default: int | None = None, hint: str = "") -> int:
    text = env.get(name)
    if text is None:
        if default is not None:
            return default
        raise ConfigurationError(
            f"{name} is not set, although other variables of the same launcher are.\n"
            f"{hint or 'Start every rank through the launcher itself'}: set {name}, or use `lockstep run`."
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is no whole number.\nSet {name} to one, or unset it.") from None


def _port(env: Mapping[str, str]) -> int | None:
    if "MASTER_PORT" not in env:
        return None
    port = _integer(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"MASTER_PORT={port} is no port number.\nSet it to a free port from 1 to 65535.")
    return port


# --- Control groups, of both versions

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def group_folders(controller: str, root: Path | None = None, own: Path | None = None) -> list[Path]:
    """Return the folders of this process's control groups, from the innermost to the root; some may not be there.

    Args:
        controller: Whose hierarchy, in the first version of control groups; the second has one for all.
        root: Where control groups are mounted.
        own: The list of this process's groups.
    """
    root, own = root or CGROUP_ROOT, own or OWN_CGROUPS
    folders = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            # Inside a container the path may be that of the host, which is not there: then its root is what counts.
            inner = (Path(path) / "x").relative_to("/").parents
            bases = [root] if names == "" else [root / names, root / controller]
            folders += [base / part for base in bases for part in inner]
    return list(dict.fromkeys([*folders, root]))


def read_groups(controller: str, file: str, root: Path | None = None, own: Path | None = None) -> list[str]:
    """Return the texts of ``file``, such as ``cpu.max``, in those of `group_folders` where it is there."""
    found = []
    for folder in group_folders(controller, root, own):
        with contextlib.suppress(OSError):
            found.append((folder / file).read_text().strip())
    return found


def cpu_quota(root: Path | None = None, own: Path | None = None) -> float | None:
    """Return the cores' worth of time that the tightest of this process's control groups allows, if one does."""
    texts = [text.split() for text in read_groups("cpu", "cpu.max", root, own)]
    periods = read_groups("cpu", "cpu.cfs_period_us", root, own)
    texts += map(list, zip(read_groups("cpu", "cpu.cfs_quota_us", root, own), periods, strict=False))
    # Without a quota the second version says "max", the first one -1.
    return min((int(quota) / int(period) for quota, period in texts if quota.isdecimal()), default=None)


def usable_cores() -> int:
    """Return how many logical cores this process may keep busy: of those it may run on, what the quota allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


# --- Sockets of loader processes
#
# A tensor travels as an open file, for which the loader process listens on a socket in a folder that `multiprocessing`
# makes below that for temporary files. A socket's path must not be longer than 107 bytes. If it would be, the error is
# printed by a thread that nobody waits for, and the rank waits for its first batch for ever. Newer versions of Python
# see to it themselves.

_MOST_BYTES = 107
_FOLDER, _SOCKET = "/pymp-xxxxxxxx", "/listener-xxxxxxxx"


def is_socket_folder_too_long(folder: str) -> bool:
    """Return whether sockets of loader processes cannot be made below ``folder`` for temporary files."""
    is_python_careful = hasattr(multiprocessing.util, "_SUN_PATH_MAX")
    return not is_python_careful and len(os.fsencode(folder + _FOLDER + _SOCKET)) > _MOST_BYTES


def check_socket_folder() -> None:
    """Check that loader processes can make their sockets where this process and its children make theirs.

    Raises:
        ConfigurationError: The folder has too long a name.
    """
    # The one that the launcher has chosen for its ranks, or a new one in that for temporary files.
    folder = multiprocessing.util.get_temp_dir()
    if is_socket_folder_too_long(os.path.dirname(folder)):
        raise ConfigurationError(
            "The folder for temporary files has too long a name for loader processes, which hand tensors over by "
            f"sockets in it: {folder}\n"
            "Name a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
        )
