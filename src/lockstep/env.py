"""Which rank this process is, read from the variables that the common launchers set. Standard library only."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from lockstep.errors import ConfigurationError
from lockstep.hostlist import first_host, tasks_on_node

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
    """Say whether ``host`` names this machine's loopback interface, without asking a name server."""
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
    prefix = "OMPI_COMM_WORLD_"
    rank, world_size = _index(env, f"{prefix}RANK", below=f"{prefix}SIZE")
    local_rank = _integer(env, f"{prefix}LOCAL_RANK")
    local_world_size = _integer(env, f"{prefix}LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("OMPI_MCA_orte_ess_jobid")
    addr, port = _mpi_meeting_place(env, world_size, local_world_size, job)
    # OMPI_COMM_WORLD_NODE_RANK is this process's index on its node, not the node's index.
    return _checked(
        RankEnv(
            rank,
            local_rank,
            world_size,
            local_world_size,
            rank // max(local_world_size, 1),
            addr,
            port,
            Launcher.OPEN_MPI,
        ),
        (f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE", f"{prefix}SIZE"),
    )


def _from_pmi(env: Mapping[str, str]) -> RankEnv:
    rank, world_size = _index(env, "PMI_RANK", below="PMI_SIZE")
    local_rank = _integer(env, "MPI_LOCALRANKID")
    local_world_size = _integer(env, "MPI_LOCALNRANKS")
    addr, port = _mpi_meeting_place(env, world_size, local_world_size, None)
    node_rank = rank // max(local_world_size, 1)
    return _checked(
        RankEnv(rank, local_rank, world_size, local_world_size, node_rank, addr, port, Launcher.PMI),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
    )


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
    """Say whether this is the one shell of an allocation, where SLURM_PROCID=0 does not mean that srun started us."""
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
