"""`World`: who this rank is, on which device, and how it reaches the others; `init` makes it, `close` undoes it."""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from lockstep import activity
from lockstep.comm.collectives import backend_name
from lockstep.comm.network import GLOO_INTERFACE, gloo_interface, gloo_interface_set, set_keepalive
from lockstep.comm.process import keep_freed_memory, make_forks_safe
from lockstep.comm.rendezvous import (
    Participant,
    Rendezvous,
    check_membership,
    format_ranks,
    join_rendezvous,
    poll_interval_s,
)
from lockstep.comm.shm.process_group import ShmProcessGroup, why_unavailable
from lockstep.env import Launcher, RankEnv
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, RankFailed, WorldSizeMismatch


def choose_device(env: RankEnv, wanted: str | torch.device | None) -> torch.device:
    """Return this rank's device and make it the current one, before anything else touches it.

    With no wish it is the GPU of the local rank where there are GPUs, else the CPU.

    Raises:
        ConfigurationError: There is no such device.
    """
    device = _parse(wanted) if wanted is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigurationError(
            f"device={str(wanted)!r} was asked for, but this machine has no usable CUDA GPU.\n"
            "Pass device='cpu', or check `nvidia-smi` and that this torch was built for CUDA "
            f"(torch.version.cuda is {torch.version.cuda})."
        )
    index = device.index if device.index is not None else _gpu_of(env, count)
    if index >= count:
        who = f"Local rank {env.local_rank}" if device.index is None else f"device={str(wanted)!r}"
        raise ConfigurationError(
            f"{who} has no GPU of its own: this process sees {count} (cuda:0 to cuda:{count - 1}).\n"
            f"Start at most {count} ranks on this machine, or pass device='cpu'."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def choose_backend(device: torch.device, wanted: str | None) -> str:
    """Return the name of the backend for ``device``: NCCL for CUDA; for the CPU shm, which needs to be tried, or Gloo.

    Raises:
        ConfigurationError: The backend that was asked for is unknown, or cannot serve the device here.
    """
    if wanted is None and device.type == "cpu" and sys.platform == "linux":
        return "shm"
    backend = (wanted or dist.get_default_backend_for_device(device)).lower()
    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            usable = sorted(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
            raise ConfigurationError(
                f"The backend {name!r} is not available in this torch.\nAvailable: {', '.join(usable)}."
            )
    if backend == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"The backend 'nccl' moves CUDA tensors only, but the device is {str(device)!r}.\n"
            "Leave backend out, or pass backend='gloo'."
        )
    return backend


def _parse(wanted: str | torch.device) -> torch.device:
    try:
        return torch.device(wanted)
    except RuntimeError:
        raise ConfigurationError(
            f"device={wanted!r} is no device.\nPass 'cpu', 'cuda', 'cuda:<index>' or a torch.device."
        ) from None


def _gpu_of(env: RankEnv, count: int) -> int:
    # Schedulers may show each task only its own GPU, which then is number 0 for all of them.
    if count == 1 and env.launcher in (Launcher.SLURM, Launcher.OPEN_MPI, Launcher.PMI):
        return 0
    return env.local_rank


# --- Barriers through the store: no device is touched, and who is missing is known

_FIRST_PAUSE_S = 0.0002
"""Before the second look at the store; later pauses are longer, as a rank that is late will be late for long."""

_DONE = "done"


@dataclass
class HostSync:
    """Barriers and leader-first blocks of one group of ranks."""

    store: Store
    group: dist.ProcessGroup
    rank: int
    world_size: int
    _num_calls: dict[str, int] = field(default_factory=dict)

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks.

        Collective: every rank. Blocks at most ``timeout_s``.

        Raises:
            CollectiveError: Ranks did not come; names them.
        """
        count, prefix = self._next("barrier")
        self.store.set(f"{prefix}/{self.rank}", "")
        if self.store.add(f"{prefix}/count", 1) == self.world_size:
            self.store.set(f"{prefix}/{_DONE}", "")
        if not self._wait(f"{prefix}/{_DONE}", timeout_s, "World.barrier"):
            missing = [rank for rank in range(self.world_size) if not self.store.check([f"{prefix}/{rank}"])]
            raise CollectiveError(
                f"Rank {self.rank} waited {timeout_s:g} s in World.barrier() number {count}; "
                f"missing: {format_ranks(missing)}.\n"
                "Those ranks ended, are stuck, or do not call barrier() as often as the others; "
                "if they are only slow, pass a longer timeout_s."
            )
        self._forget(f"barrier/{count - 1}")

    def announce(self, leader: str, outcome: str | None) -> None:
        """Release those who wait in `await_leader`: the block is over; ``outcome`` is the error, if any."""
        _, prefix = self._next(leader)
        self.store.set(prefix, outcome or _DONE)

    def await_leader(self, leader: str, timeout_s: float) -> None:
        """Wait until the leader has announced its block's end.

        Raises:
            RankFailed: The leader failed in its block.
            CollectiveError: It did not finish in time.
        """
        _, key = self._next(leader)
        if not self._wait(key, timeout_s, "World.rank_zero_first"):
            raise CollectiveError(
                f"Rank {self.rank} waited {timeout_s:g} s for {leader} to finish its rank_zero_first() block.\n"
                "It ended, is stuck, or never reached the block; if it is only slow, pass a longer timeout_s."
            )
        outcome = self.store.get(key).decode()
        if outcome != _DONE:
            raise RankFailed(f"{leader.capitalize()} failed in its rank_zero_first() block: {outcome}")

    def _next(self, what: str) -> tuple[int, str]:
        self._num_calls[what] = self._num_calls.get(what, 0) + 1
        return self._num_calls[what], f"{what}/{self._num_calls[what]}"

    def _forget(self, prefix: str) -> None:
        # All have left the barrier before the one that all have entered.
        self.store.delete_key(f"{prefix}/{self.rank}")
        if self.rank == 0:
            self.store.delete_key(f"{prefix}/count")
            self.store.delete_key(f"{prefix}/{_DONE}")

    def _wait(self, key: str, timeout_s: float, operation: str) -> bool:
        """Poll for ``key``: a blocking wait would hold back Ctrl-C."""
        deadline = time.monotonic() + timeout_s
        pause, longest = _FIRST_PAUSE_S, 5 * poll_interval_s(self.world_size)
        with activity.waiting(operation):
            while not self.store.check([key]):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(pause * 1.5, longest)
        return True


# --- The process group: how it is made and left

LEAVE_TIMEOUT_S = 10.0


def destroy_default_group(*, abort: bool, at_exit: bool = False) -> None:
    """Destroy the default process group and all made from it.

    Blocks at most `LEAVE_TIMEOUT_S`: the work is done by a thread that is left behind when it takes longer, as NCCL
    may wait for a peer that will never answer.

    Args:
        abort: Give up what is in flight, since a peer may have failed; else wait for it.
        at_exit: This process is about to end.
    """
    if not dist.is_initialized():
        return
    if abort or at_exit:
        _never_destruct(list(dist.distributed_c10d._world.pg_map))
    failure: list[Exception] = []

    def leave() -> None:
        try:
            if abort:
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=leave, name="lockstep-teardown", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        print(
            f"lockstep: the process group could not be closed within {LEAVE_TIMEOUT_S:g} s, as another rank may be "
            "stuck; it is left to the end of this process.",
            file=sys.stderr,
        )
    elif failure:
        warnings.warn(f"closing the process group failed: {failure[0]}", RuntimeWarning, stacklevel=2)


def _never_destruct(groups: list[dist.ProcessGroup]) -> None:
    """Leak process groups on purpose.

    Gloo cannot abort: its destructor waits for what is in flight, up to the timeout of a collective (half an hour), and
    so would hold up the end of a process whose peer is stuck. What ends with the process needs no destructor.
    """
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_GLOO_CONNECT_FACTOR = 5
"""Gloo waits this many times its timeout for a connection."""

_FAREWELL_S = 5.0
"""How long the host of the store waits at the end for ranks that still use it."""


@dataclass
class OwnedGroup:
    """What `start` opened, to be ended once."""

    meeting: Rendezvous
    store: Store
    world_size: int
    undo: ExitStack

    def end(self, *, abort: bool, at_exit: bool = False) -> None:
        """Leave the group; with ``abort`` without waiting for the other ranks."""
        destroy_default_group(abort=abort, at_exit=at_exit)
        self.undo.close()
        with suppress(dist.DistError):  # The host of the store may be gone already.
            self.store.add("left", 1)
            deadline = time.monotonic() + _FAREWELL_S
            while self.meeting.is_host and not abort and time.monotonic() < deadline:
                if self.store.add("left", 0) >= self.world_size:
                    break
                time.sleep(poll_interval_s(self.world_size))


def start(
    env: RankEnv, *, backend: str | None, device: str | torch.device | None, timeout_s: float
) -> tuple[OwnedGroup, torch.device]:
    """Make the default process group of this job; returns what ends it, and this rank's device.

    Collective: every rank. Blocks until all have come, at most about ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    chosen, name, objection = _choose(env, backend, device)
    if objection is not None and env.world_size == 1:
        raise objection
    meeting = join_rendezvous(env, timeout_s)
    if env.world_size > 1:
        _meet(env, meeting, name, objection, deadline, timeout_s)
    one_machine = env.local_world_size == env.world_size
    if backend is None and name == "shm":
        name = _shm_or_gloo(env, PrefixStore(f"{meeting.prefix}/shm", meeting.store), expected=one_machine)
    with ExitStack() as stack:
        stack.enter_context(gloo_interface_set(gloo_interface(env.master_addr, one_machine=one_machine)))
        _connect(env, meeting, name, chosen, timeout_s)
        if not one_machine:
            set_keepalive()
        undo = stack.pop_all()
    # The limit until here was for connecting; a collective may wait longer for a slow rank.
    limit = (default_pg_nccl_timeout if name == "nccl" else None) or default_pg_timeout
    group = dist.group.WORLD
    if isinstance(group, ShmProcessGroup):
        group.set_timeout(limit)  # torch's function knows its own backends only
    else:
        dist.distributed_c10d._set_pg_timeout(limit)
    meeting.store.set_timeout(default_pg_timeout)
    return OwnedGroup(meeting, PrefixStore(meeting.prefix, meeting.store), env.world_size, undo), chosen


def _choose(
    env: RankEnv, backend: str | None, device: str | torch.device | None
) -> tuple[torch.device, str, LockstepError | None]:
    """Choose device and backend; what is wrong with them is returned, as the other ranks are to learn of it too."""
    try:
        chosen = choose_device(env, device)
        return chosen, choose_backend(chosen, backend), None
    except LockstepError as error:
        return torch.device("cpu"), "", error


def _meet(
    env: RankEnv, meeting: Rendezvous, backend: str, objection: LockstepError | None, deadline: float, timeout_s: float
) -> None:
    try:
        check_membership(
            PrefixStore(f"{meeting.prefix}/roll", meeting.store),
            Participant(env.rank, env.world_size, backend, socket.gethostname(), os.getpid()),
            deadline=deadline,
            timeout_s=timeout_s,
            is_host=meeting.is_host,
            hint=meeting.hint,
            objection=None if objection is None else str(objection),
        )
    except dist.DistError as error:
        raise WorldSizeMismatch(
            f"Rank {env.rank} of {env.world_size} lost the store while it waited for the other ranks: its host ended.\n"
            "Look at the output of rank 0, which hosts it, or of the launcher."
        ) from error


def _shm_or_gloo(env: RankEnv, store: Store, *, expected: bool) -> str:
    """Return ``shm`` if all ranks can map one memory, else ``gloo``; report it if they were ``expected`` to.

    Collective: every rank. Blocks until all have come.
    """
    reason = why_unavailable(store, env.rank, env.world_size)
    if reason and expected and env.rank == 0:
        print(f"lockstep: Gloo serves this job, which is slower than shared memory: {reason}.", file=sys.stderr)
    return "gloo" if reason else "shm"


def _connect(env: RankEnv, meeting: Rendezvous, backend: str, device: torch.device, timeout_s: float) -> None:
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{meeting.prefix}/group", meeting.store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(seconds=timeout_s / _GLOO_CONNECT_FACTOR if "gloo" in backend else timeout_s),
            # Binds the communicator to the device now, so that no collective has to guess it.
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise CollectiveError(
            f"Rank {env.rank} on {socket.gethostname()} met the other ranks, but could not connect to them over "
            f"{backend}: {error}\n"
            "Another rank may have ended meanwhile. Otherwise the network interface is the wrong one: set "
            f"{GLOO_INTERFACE} (for NCCL: NCCL_SOCKET_IFNAME) to one that reaches the other machines, and let the "
            "firewall pass all ports between them."
        ) from error


# --- The world

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

    def __init__(
        self, env: RankEnv, device: torch.device, group: dist.ProcessGroup, session: OwnedGroup | None
    ) -> None:
        make_forks_safe()
        if device.type == "cpu":
            keep_freed_memory()
        activity.now.failure = None  # of a world before this one
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._session is not None:
            activity.now.fail(error)
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
