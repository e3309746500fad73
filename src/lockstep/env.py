"""Where this process runs: its rank, the cores it may use, and room for its sockets. Standard library only."""

from __future__ import annotations

import ipaddress
import multiprocessing.util
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from zlib import crc32

from lockstep.errors import ConfigurationError

# --- SLURM's compressed notations: ``gpu[003-005,9],login`` for hosts and ``4(x2),1`` for tasks on each node

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(hosts: str, *, variable: str) -> str:
    """Return the first host of a SLURM host list.

    Args:
        hosts: As in SLURM_NODELIST.
        variable: The environment variable that it came from, for the message.

    Raises:
        ConfigurationError: The list has no first host.
    """
    name = ""
    rest = hosts
    while rest and rest[0] != ",":
        if rest[0] == "[":
            inside, closed, rest = rest[1:].partition("]")
            # Of "003-005,9" the first is 003: as text, since the zeros are part of the name.
            first = re.split(r"[-,]", inside)[0]
            if not closed or not first.isdigit():
                raise ConfigurationError(_unreadable(variable, hosts))
            name += first
        else:
            name, rest = name + rest[0], rest[1:]
    if not name or "]" in name:
        raise ConfigurationError(_unreadable(variable, hosts))
    return name


def tasks_on_node(layout: str, node: int, *, variable: str) -> int:
    """Return the number of tasks on the node of index ``node`` from SLURM's count per node.

    Raises:
        ConfigurationError: The notation cannot be read, or has fewer nodes than that.
    """
    seen = 0
    for part in layout.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(_unreadable(variable, layout))
        seen += int(match[2] or 1)
        if node < seen:
            return int(match[1])
    raise ConfigurationError(
        f"{variable}={layout} counts {seen} nodes, but SLURM_NODEID={node}.\n"
        "Start the ranks with srun, so that these variables belong to the same step."
    )


def _unreadable(variable: str, value: str) -> str:
    return (
        f"{variable}={value!r} cannot be read.\nSet MASTER_ADDR to the host of rank 0 yourself, and unset {variable}."
    )


# --- The rank of this process

DEFAULT_MASTER_PORT = 29500
"""The port that torchrun uses when none is given."""

_MASTER_PORT_RANGE = range(20000, 32000)
"""Where ports derived from a job's id lie: below what Linux hands out to outgoing connections (32768 and up)."""


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
        present = {name: value.strip() for name, value in environ.items() if value.strip()}
        if "RANK" in present:
            return _from_torchrun(present)
        if "OMPI_COMM_WORLD_RANK" in present:
            return _agreeing(_from_open_mpi(present), present)
        if "PMI_RANK" in present and ("MPI_LOCALRANKID" in present or "SLURM_PROCID" not in present):
            return _agreeing(_from_pmi(present), present)
        if "SLURM_PROCID" in present and not _is_batch_shell(present):
            return _agreeing(_from_slurm(present), present)
        for name in ("LOCAL_RANK", "WORLD_SIZE"):
            if name in present and not (name == "WORLD_SIZE" and present[name] == "1"):
                raise ConfigurationError(
                    f"{name} is set, but RANK is not.\n"
                    "Start the ranks with `lockstep run`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
                    "MASTER_PORT for each."
                )
        return cls(0, 0, 1, 1, 0, None, None, Launcher.NONE)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine's loopback interface, without asking a name server."""
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _from_torchrun(env: Mapping[str, str]) -> RankEnv:
    rank, world_size = _index(env, "RANK", below="WORLD_SIZE")
    master_addr, master_port = env.get("MASTER_ADDR"), _port(env)
    if world_size > 1:
        for name, value in (("MASTER_ADDR", master_addr), ("MASTER_PORT", master_port)):
            if value is None:
                raise ConfigurationError(
                    f"RANK and WORLD_SIZE are set, but {name} is not.\n"
                    "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on every rank."
                )
    one_machine = world_size == 1 or (master_addr is not None and is_loopback(master_addr))
    if one_machine:
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", default=world_size)
        local_rank = _integer(env, "LOCAL_RANK", default=rank)
    else:
        hint = "With ranks on several machines, each needs its index on its own machine"
        local_rank = _integer(env, "LOCAL_RANK", hint=hint)
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", hint=hint.replace("its index", "the number of ranks"))
    node_rank = _integer(
        env, "GROUP_RANK", default=_integer(env, "NODE_RANK", default=rank // max(local_world_size, 1))
    )
    return _checked(
        RankEnv(rank, local_rank, world_size, local_world_size, node_rank, master_addr, master_port, Launcher.TORCHRUN),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    )


def _from_open_mpi(env: Mapping[str, str]) -> RankEnv:
    # OMPI_COMM_WORLD_NODE_RANK is this process's index on its node, not the node's index.
    names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("OMPI_MCA_orte_ess_jobid")
    return _from_mpi(env, names, job, Launcher.OPEN_MPI)


def _from_pmi(env: Mapping[str, str]) -> RankEnv:
    return _from_mpi(env, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), None, Launcher.PMI)


def _from_mpi(env: Mapping[str, str], names: tuple[str, ...], job: str | None, launcher: Launcher) -> RankEnv:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, world_size = _index(env, rank_name, below=size_name)
    local_rank, local_world_size = _integer(env, local_rank_name), _integer(env, local_size_name)
    addr, port = _mpi_meeting_place(env, world_size, local_world_size, job)
    node_rank = rank // max(local_world_size, 1)
    found = RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, launcher)
    return _checked(found, (local_rank_name, local_size_name, size_name))


def _from_slurm(env: Mapping[str, str]) -> RankEnv:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, world_size = _index(env, "SLURM_PROCID", below=size_name)
    local_rank = _integer(env, "SLURM_LOCALID")
    node_rank = _integer(env, "SLURM_NODEID")
    layout_name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_TASKS_PER_NODE"
    if layout_name in env:
        local_world_size = tasks_on_node(env[layout_name], node_rank, variable=layout_name)
    else:
        nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
        num_nodes = _integer(env, nodes_name, default=1)
        local_world_size = _integer(env, "SLURM_NTASKS_PER_NODE", default=-(-world_size // max(num_nodes, 1)))
    addr, port = env.get("MASTER_ADDR"), _port(env)
    if addr is None:
        hosts_name = next(
            (n for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST") if n in env), None
        )
        if hosts_name is not None:
            addr = first_host(env[hosts_name], variable=hosts_name)
        elif world_size == local_world_size:
            addr = "127.0.0.1"
        else:
            raise ConfigurationError(
                "SLURM_PROCID is set, but neither SLURM_NODELIST nor MASTER_ADDR says where rank 0 runs.\n"
                "Start the ranks with srun, or export MASTER_ADDR=<host of rank 0>."
            )
    if port is None:
        # Two steps of one job may run side by side, so the step counts too.
        port = _port_of_job(f"{env.get('SLURM_JOB_ID', env.get('SLURM_JOBID', ''))}.{env.get('SLURM_STEP_ID', '')}")
    return _checked(
        RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, Launcher.SLURM),
        ("SLURM_LOCALID", layout_name, size_name),
    )


def _is_batch_shell(env: Mapping[str, str]) -> bool:
    """Return whether this is the shell of an allocation, where SLURM_PROCID=0 does not mean that srun started us."""
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    return not in_step and (env.get("ENVIRONMENT") == "BATCH" or env.get("SLURM_JOB_NAME") in ("bash", "interactive"))


def _mpi_meeting_place(
    env: Mapping[str, str], world_size: int, local_world_size: int, job: str | None
) -> tuple[str, int]:
    addr, port = env.get("MASTER_ADDR"), _port(env)
    if addr is None:
        if world_size != local_world_size:
            raise ConfigurationError(
                "MASTER_ADDR is not set, and mpirun does not tell where rank 0 runs.\n"
                "Pass it on: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ... "
                "(MPICH and Intel MPI: -genv MASTER_ADDR <host>)."
            )
        addr = "127.0.0.1"
    return addr, port or (_port_of_job(job) if job else DEFAULT_MASTER_PORT)


def _port_of_job(job: str) -> int:
    """Return a port that every rank of ``job`` finds alike, without talking to the others."""
    return _MASTER_PORT_RANGE[crc32(job.encode()) % len(_MASTER_PORT_RANGE)]


def _agreeing(found: RankEnv, env: Mapping[str, str]) -> RankEnv:
    """Return ``found`` unless torchrun's own variables, set as well, say something else."""
    for name, value in (("WORLD_SIZE", found.world_size), ("LOCAL_RANK", found.local_rank)):
        if name in env and _integer(env, name) != value:
            raise ConfigurationError(
                f"{name}={env[name]} contradicts what {found.launcher.value} says ({value}).\n"
                f"Unset {name}, or start the ranks with as many tasks as it says."
            )
    return found


def _checked(found: RankEnv, names: tuple[str, str, str]) -> RankEnv:
    """Return ``found`` if its local numbers fit each other and the world; ``names`` are the variables to blame."""
    local_rank_name, local_size_name, size_name = names
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
            f"The node rank is {found.node_rank}.\nNodes count from 0: check GROUP_RANK or NODE_RANK."
        )
    return found


def _index(env: Mapping[str, str], name: str, *, below: str) -> tuple[int, int]:
    """Return the integers of ``name`` and ``below`` after checking ``0 <= name < below``."""
    index, size = _integer(env, name), _integer(env, below)
    if size < 1:
        raise ConfigurationError(f"{below}={size} is no world size.\nSet it to the number of processes of the job.")
    if not 0 <= index < size:
        raise ConfigurationError(
            f"{name}={index} is out of range for {below}={size}.\nRanks count from 0 to {size - 1}."
        )
    return index, size


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
    folders = list(dict.fromkeys(_groups_of(controller, root, own)))
    return [*folders, *([] if root in folders else [root])]


def _groups_of(controller: str, root: Path, own: Path) -> Iterator[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            # Inside a container the path may be that of the host, which is not there: then its root is what counts.
            inner = (Path(path) / "x").relative_to("/").parents
            bases = [root] if names == "" else [root / names, root / controller]
            yield from (base / part for base in bases for part in inner)


def read_groups(controller: str, file: str, root: Path | None = None, own: Path | None = None) -> list[str]:
    """Return the texts of ``file``, such as ``cpu.max``, in those of `group_folders` where it is there."""
    found = []
    for folder in group_folders(controller, root, own):
        try:
            found.append((folder / file).read_text().strip())
        except OSError:
            continue
    return found


def cpu_quota(root: Path | None = None, own: Path | None = None) -> float | None:
    """Return the cores' worth of time that the tightest of this process's control groups allows, if one does."""
    quotas = [_cores_of_quota(*text.split()) for text in read_groups("cpu", "cpu.max", root, own)]
    periods = read_groups("cpu", "cpu.cfs_period_us", root, own)
    old = zip(read_groups("cpu", "cpu.cfs_quota_us", root, own), periods, strict=False)
    quotas += [_cores_of_quota(quota, period) for quota, period in old]
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cores() -> int:
    """Return how many logical cores this process may keep busy: of those it may run on, what the quota allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def _cores_of_quota(quota: str, period: str) -> float | None:
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:  # it says "max"
        return None


# --- Sockets of loader processes
#
# A tensor travels as an open file, for which the loader process listens on a socket in a folder that `multiprocessing`
# makes below that for temporary files. A socket's path must not be longer than 107 bytes. If it would be, the error is
# printed by a thread that nobody waits for, and the rank waits for its first batch for ever. Newer versions of Python
# see to it themselves.

_MOST_BYTES = 107
_FOLDER, _SOCKET = "/pymp-xxxxxxxx", "/listener-xxxxxxxx"
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def is_socket_folder_too_long(folder: str) -> bool:
    """Return whether sockets of loader processes cannot be made below ``folder`` for temporary files."""
    return not hasattr(multiprocessing.util, "_SUN_PATH_MAX") and _bytes(folder + _FOLDER) > _MOST_BYTES


def ensure_short_socket_folder(rather: str | None = None) -> None:
    """Have this process and its children make their sockets where their names are short enough.

    Other temporary files stay where they are. Does nothing if names are short enough.

    Args:
        rather: A folder that is taken if its own name is short enough.

    Raises:
        ConfigurationError: There is no such folder that can be written to, or it is too late for another.
    """
    folder = tempfile.gettempdir()
    if not is_socket_folder_too_long(folder):
        return
    short = next(filter(_is_fit, [*([] if rather is None else [rather]), *_SHORT]), None)
    if short is not None:
        tempfile.tempdir = short
        try:
            made = multiprocessing.util.get_temp_dir()  # the one that there is, if there is one
        finally:
            tempfile.tempdir = folder
        if _bytes(made) <= _MOST_BYTES:
            return
    raise ConfigurationError(
        f"The folder for temporary files has too long a name for loader processes, which hand tensors over by sockets "
        f"in it: {folder}\nName a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
    )


def _is_fit(folder: str) -> bool:
    return not is_socket_folder_too_long(folder) and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def _bytes(folder: str) -> int:
    return len(os.fsencode(folder + _SOCKET))
