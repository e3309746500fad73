"""`World`: who this rank is, on which device, and how it reaches the others."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lockstep import progress
from lockstep.comm.collectives import backend_name
from lockstep.comm.forks import make_forks_safe
from lockstep.comm.freed_memory import keep_freed_memory
from lockstep.comm.hardware import choose_device
from lockstep.comm.host_sync import HostSync
from lockstep.comm.startup import Session, start
from lockstep.env import Launcher, RankEnv
from lockstep.errors import ConfigurationError

BARRIER_TIMEOUT_S = 1800.0
"""torch's own limit for a collective on Gloo; long, because a rank may be downloading a data set meanwhile."""


class World:
    """The ranks of this job as one of them sees them.

    Made by `lockstep.init`. A context manager: leaving the block closes what `init` opened, also after an error and
    without waiting for ranks that failed.

    Attributes:
        rank: From 0 to ``world_size - 1``, unique in the job.
        local_rank: From 0 to ``local_world_size - 1``, unique on this machine.
        world_size: The number of ranks.
        local_world_size: The number of ranks on this machine.
        node_rank: The index of this machine.
        device: Where this rank computes.
        backend: What carries the collectives, such as ``nccl``, ``shm`` or ``gloo``.
        group: The process group of all ranks.
    """

    def __init__(self, env: RankEnv, device: torch.device, group: dist.ProcessGroup, session: Session | None) -> None:
        make_forks_safe()
        if device.type == "cpu":
            keep_freed_memory()
        progress.now.failure = None  # of a world before this one
        self.rank = env.rank
        self.local_rank = env.local_rank
        self.world_size = env.world_size
        self.local_world_size = env.local_world_size
        self.node_rank = env.node_rank
        self.device = device
        self.backend: str = backend_name(group)
        self.group = group
        self._session = session
        self._sync = _sync_of(group)

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None = None, *, device: str | torch.device | None = None) -> World:
        """Describe a process group that exists already; closing this world leaves the group as it is.

        Args:
            group: The default process group if ``None``.
            device: As for `init`.

        Raises:
            ConfigurationError: There is no such process group, or no such device.
        """
        group = group if group is not None else dist.group.WORLD
        if group is None or not dist.is_initialized():
            raise ConfigurationError(
                "There is no process group in this process yet.\nCall lockstep.init(), which makes one."
            )
        env = _env_of(group)
        return cls(env, choose_device(env, device), group, None)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, the one that prints and saves."""
        return self.rank == 0

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = True
    ) -> None:
        """Print on rank zero; do nothing on the others."""
        if self.is_rank_zero:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until every rank has come here.

        Collective: every rank. Blocks at most ``timeout_s``. Orders the processes, not their devices: work that was
        queued on a GPU may still be running.

        Raises:
            CollectiveError: Ranks did not come; names them.
        """
        self._sync.barrier(timeout_s)

    @contextmanager
    def rank_zero_first(self, *, local: bool = False, timeout_s: float = BARRIER_TIMEOUT_S) -> Iterator[None]:
        """Run the block on rank zero, and only then on the others, as for a download that the others find done.

        Collective: every rank. The others block until rank zero has left the block, at most ``timeout_s``.

        Args:
            local: The first rank of each machine goes first, for files that the machines do not share.
            timeout_s: How long the others wait.

        Raises:
            RankFailed: The rank that went first failed in the block; raised on those that waited.
            CollectiveError: It did not finish in time.
        """
        leader = f"local rank 0 of node {self.node_rank}" if local else "rank 0"
        if (self.local_rank if local else self.rank) != 0:
            self._sync.await_leader(leader, timeout_s)
            yield
            return
        try:
            yield
        except BaseException as error:
            self._sync.announce(leader, f"{type(error).__name__}: {error}")
            raise
        self._sync.announce(leader, None)

    def close(self) -> None:
        """Leave the process group if `init` made it; again has no effect. Blocks some seconds at most."""
        self._close(abort=False)

    def _close(self, *, abort: bool, at_exit: bool = False) -> None:
        if self._session is not None:
            atexit.unregister(self._close_at_exit)
            session, self._session = self._session, None
            _syncs.pop(self.group.group_name, None)
            session.end(abort=abort, at_exit=at_exit)

    def _close_at_exit(self) -> None:
        # Set by the interpreter when an exception ended the script: the other ranks may be waiting in a collective.
        self._close(abort=getattr(sys, "last_value", None) is not None, at_exit=True)

    def __enter__(self) -> World:
        block = sys._getframe(1)  # known to let exceptions pass: see telemetry/uncaught.py
        progress.now.passing.add((block.f_code.co_filename, block.f_lineno))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._session is not None:
            progress.now.fail(error)
        self._close(abort=error is not None)

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, world_size={self.world_size}, local_rank={self.local_rank}, "
            f"node_rank={self.node_rank}, device={str(self.device)!r}, backend={self.backend!r})"
        )


def init(*, backend: str | None = None, device: str | torch.device | None = None, timeout_s: float = 60.0) -> World:
    """Join the ranks that were started with this one, and return the world they form.

    Reads what torchrun, SLURM or MPI wrote into the environment; without any of them it is a world of one, which needs
    no address. Sets the device before anything uses it. If this process has a process group already, the world
    describes that one, and closing it leaves the group alone.

    Collective: every rank. Blocks until all have come.

    Args:
        backend: If ``None``: ``nccl`` for GPUs; for CPUs ``shm`` where all ranks can share memory, else ``gloo``.
        device: The GPU of this local rank if ``None`` and there are GPUs, else the CPU.
        timeout_s: How long to wait for the other ranks.

    Raises:
        WorldSizeMismatch: Not all ranks came in time, or one came twice; on every rank that came, naming the others.
        ConfigurationError: The environment, the device or the backend is wrong; names the variable.
    """
    if dist.is_initialized():
        world = World.from_group(device=device)
        if backend is not None and backend.lower() != world.backend:
            raise ConfigurationError(
                f"This process has a process group already, with the backend {world.backend!r}, "
                f"so it cannot have {backend!r}.\nCall init() once, or leave backend out the second time."
            )
        return world
    env = RankEnv.from_environ(os.environ)
    session, chosen = start(env, backend=backend, device=device, timeout_s=timeout_s)
    group = dist.group.WORLD
    assert group is not None
    world = World(env, chosen, group, session)
    atexit.register(world._close_at_exit)
    return world


_syncs: dict[str, HostSync] = {}
"""By group, not by world: all worlds of one group must count their barriers together."""


def _sync_of(group: dist.ProcessGroup) -> HostSync:
    name = group.group_name
    store = PrefixStore(f"lockstep/sync/{name}", dist.distributed_c10d._get_default_store())
    known = _syncs.get(name)
    if known is None or known.group is not group:
        _syncs[name] = HostSync(store, group, dist.get_rank(group), dist.get_world_size(group))
    return _syncs[name]


def _env_of(group: dist.ProcessGroup) -> RankEnv:
    """Return the place in ``group``; where the environment does not describe it, all ranks are taken to be here."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    try:
        env = RankEnv.from_environ(os.environ)
        if (env.rank, env.world_size) == (rank, world_size):
            return env
    except ConfigurationError:
        pass  # The group was made without these variables, so they need not make sense.
    return RankEnv(rank, rank, world_size, world_size, 0, None, None, Launcher.NONE)
