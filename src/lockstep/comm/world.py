"""`World`: this rank, its device, and its connection to the other ranks. `init` creates it, `close` undoes that."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import ClassVar, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore
from torch.distributed.constants import default_pg_timeout

from lockstep.base import activity, torch_internals
from lockstep.base.accelerator import default_device, start_thread
from lockstep.base.env import Launcher, RankEnv, check_step
from lockstep.comm import hierarchy, network, rendezvous
from lockstep.comm.collectives import backend_name
from lockstep.comm.process import keep_freed_memory, make_forks_safe
from lockstep.comm.shm.process_group import CpuProcessGroup
from lockstep.comm.store import read_present
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, RankFailed


def choose_device(env: RankEnv, wanted: str | torch.device | None) -> torch.device:
    """Return this rank's device and make it the current one, before anything else touches it.

    By default it is the accelerator of the local rank if torch finds accelerators, else the CPU.

    Raises:
        ConfigurationError: There is no such device.
    """
    try:
        device = torch.device(wanted or default_device())
    except RuntimeError:
        raise ConfigurationError(
            f"device={wanted!r} is not a device.\nPass 'cpu', 'cuda', 'cuda:<index>' or a torch.device."
        ) from None
    if device.type == "cpu":
        return device
    default, count = default_device(), torch.accelerator.device_count()
    if default.type != device.type:
        raise ConfigurationError(
            f"device={str(wanted)!r} was requested, but this machine has no usable {device.type.upper()} device.\n"
            f"Pass device='cpu', or check the driver, and that torch {torch.__version__} was built for it or that the "
            "package which adds it to torch is imported before."
        )
    # Schedulers may show each task only its own GPU, which is then number 0 in every task.
    sees_its_own = count == 1 and env.launcher not in (Launcher.NONE, Launcher.TORCHRUN)
    index = device.index if device.index is not None else 0 if sees_its_own else env.local_rank
    if index >= count:
        owner = f"Local rank {env.local_rank}" if device.index is None else f"device={str(wanted)!r}"
        raise ConfigurationError(
            f"{owner} has no device of its own: this process sees {count} ({default}:0 to {default}:{count - 1}).\n"
            f"Start at most {count} ranks on this machine, or pass device='cpu'."
        )
    device = torch.device(device.type, index)
    activity.now.device = index
    torch.accelerator.set_device_index(device)
    return device


def choose_backend(device: torch.device, wanted: str | None) -> str:
    """Return the backend's name for ``device``: torch's default; for the CPU shm, which has to be tried, or Gloo.

    Raises:
        ConfigurationError: The requested backend is unknown, or cannot serve the device here.
    """
    if wanted is None and device.type == "cpu":
        return "shm"
    backend = (wanted or dist.Backend.default_device_backend_map.get(device.type, f"default for {device.type}")).lower()
    for name in _names(backend):
        if not dist.is_backend_available(name):
            usable = sorted(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
            raise ConfigurationError(
                f"The backend {name!r} is not available in this torch.\nAvailable: {', '.join(usable)}."
            )
    served = dist.Backend.backend_capability.get(backend, [device.type])
    if device.type not in served:
        raise ConfigurationError(
            f"The backend {backend!r} moves {' and '.join(served)} tensors only, but the device is {str(device)!r}.\n"
            "Leave backend out: torch's default for the device is then used."
        )
    return backend


# --- The process group: how it is created and left

LEAVE_TIMEOUT_S = 10.0


def destroy_default_group(*, abort: bool, at_exit: bool, is_cut: bool = False) -> None:
    """Destroy the default process group and all groups made from it. Blocks at most `LEAVE_TIMEOUT_S`.

    Args:
        abort: Abort collectives in flight, since a peer may have failed; else wait for them.
        at_exit: This process is about to end.
        is_cut: Whether collectives in flight have failed already.
    """
    if not dist.is_initialized():
        return
    for group in torch_internals.process_groups() if abort or at_exit else []:
        # Leaked on purpose. Gloo cannot abort: its destructor waits for collectives in flight, up to their timeout
        # (half an hour), and would delay the end of a process whose peer is stuck. That of NCCL joins its watchdog,
        # which may sleep for minutes after an error.
        is_cpus = backend_name(group) == "gloo" or {device.type for device in group._device_types} == {"cpu"}
        if not is_cut or network.is_stuck() or not is_cpus:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    try:  # NCCL may wait for a peer that will never answer
        activity.in_time(LEAVE_TIMEOUT_S, torch_internals.abort_process_group if abort else dist.destroy_process_group)
    except TimeoutError:
        why = "another rank may be stuck"
        if activity.now.has_captured:
            why = "a CUDA graph with its collectives may be alive (delete graphs before, or call their reset())"
        print(
            f"lockstep: the process group could not be closed within {LEAVE_TIMEOUT_S:g} s, as {why}; "
            "it is left to the end of this process.",
            file=sys.stderr,
        )
    except Exception as error:
        warnings.warn(f"closing the process group failed: {error}", RuntimeWarning, stacklevel=2)
    activity.now.has_captured = False


# Gloo waits this many times its timeout for a connection.
_GLOO_CONNECT_FACTOR = 5
# How long the host of the store waits at the end for ranks that still use it.
_FAREWELL_S = 5.0
# What `init` opened: the store of the job, and everything else to undo at the end.
Owned = tuple[rendezvous.Rendezvous, ExitStack]


def form_group(
    env: RankEnv,
    store: dist.Store,
    backend: str,
    device: torch.device,
    timeout_s: float,
    undo: ExitStack,
    is_over: Callable[[], bool] | None = None,
) -> dist.ProcessGroup:
    """Create the default process group of the ranks that have met in ``store``, and return it.

    Collective: every rank. Blocks until connected.

    Args:
        env: The place of this rank.
        store: Without keys of another group.
        backend: Its name, from `choose_backend`.
        device: Of this rank.
        timeout_s: How long to wait for a connection.
        undo: Gets what to undo when the world is closed.
        is_over: In a recovery: whether the group is of no use any more. Then the wait for devices ends, which also has
            a limit: ``timeout_s`` more than a collective has.

    Raises:
        CollectiveError: The ranks cannot be connected.
    """
    one_machine = env.local_world_size == env.world_size
    interface = network.gloo_interface(env.master_addr, one_machine=one_machine)
    if interface is not None and network.GLOO_INTERFACE not in os.environ:  # the user's choice is never changed
        os.environ[network.GLOO_INTERFACE] = interface
        # Only at the end of the world, since groups that are created later also need it.
        undo.callback(os.environ.pop, network.GLOO_INTERFACE, None)
    before, connected, network.cut_at_s = network.listening(), Future[None](), math.inf
    limit = torch_internals.default_timeout(dist.Backend(backend))
    try:
        bound = _connect(env, PrefixStore("group", store), backend, device, timeout_s, binds=is_over is None)
        group = dist.group.WORLD
        assert group is not None
        if "gloo" in backend_name(group):
            network.note_links(before, PrefixStore("links", store), env.rank, env.world_size)
        if is_over is not None and device.type != "cpu":
            # Not in `init_process_group`, and not in this thread: NCCL knows no limit here, and until it has connected,
            # nothing ends its call. If a rank is lost meanwhile, the thread is left behind with the group.
            group.bound_device_id = bound
            connect = partial(torch_internals.backend_of(group, device).eager_connect_single_device, device)
            start_thread(partial(activity.settle, connected, connect), name="lockstep-connect", device=device)
            limit_s, pause_s = timeout_s + limit.total_seconds(), rendezvous.poll_interval_s(1)
            if not rendezvous.poll_until(lambda: connected.done() or is_over(), limit_s, pause_s) or is_over():
                raise CollectiveError(f"a rank was lost, or the devices have not connected within {limit_s:g} s.")
            connected.result()
    except RuntimeError as error:
        destroy_default_group(abort=True, at_exit=False, is_cut=True)
        raise CollectiveError(
            f"Rank {env.rank} on {socket.gethostname()} found the other ranks, but could not connect to them over "
            f"{backend}: {error}\n"
            "Another rank may have ended. Otherwise the network interface is wrong: set "
            f"{network.GLOO_INTERFACE} (for NCCL: NCCL_SOCKET_IFNAME) to one that reaches the other machines, and let "
            "the firewall pass all ports between them."
        ) from error
    if not one_machine:
        network.set_keepalive()
    # The limit so far was for connecting; a collective may wait longer for a slow rank.
    if isinstance(group, CpuProcessGroup):
        group._set_default_timeout(limit)  # torch's function knows its own backends only
    elif not _keeps_timeout(backend):
        torch_internals.set_timeout(limit)
    return group


def _connect(
    env: RankEnv, store: dist.Store, backend: str, device: torch.device, timeout_s: float, *, binds: bool = True
) -> torch.device | None:
    """Create the group; connect NCCL if ``binds``. Return the device that its collectives are on, if they need to know.

    Otherwise a collective would have to guess it. With other backends than NCCL, torch would later refuse groups over
    Gloo, which does not support their devices.
    """
    limit_s = default_pg_timeout.total_seconds() if _keeps_timeout(backend) else timeout_s
    if "gloo" in backend or backend == "shm":  # on several machines, shm also connects over Gloo
        limit_s /= _GLOO_CONNECT_FACTOR
    bound = device if device.type == "cuda" and "nccl" in _names(backend) else None
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=limit_s),
        device_id=bound if binds else None,
    )
    return bound


def _names(backend: str) -> list[str]:
    """Return the backends in a name such as ``cpu:gloo,cuda:nccl``."""
    return [part.rpartition(":")[2] for part in backend.split(",")]


def _keeps_timeout(backend: str) -> bool:
    """Return whether its collectives keep the timeout of the start: torch's set_timeout supports gloo and nccl only."""
    return not {*_names(backend)} <= {"gloo", "nccl", "shm"}


# --- The world

# torch's own limit for a collective on Gloo; long, because another rank may be downloading a data set.
BARRIER_TIMEOUT_S = 1800.0

_DONE = "done"


class World:
    """The ranks of this job as one of them sees them.

    Created by `lockstep.init`. A context manager: leaving the block closes what `init` opened. After an error, it does
    so without waiting for ranks that failed.

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

    # What `init` has made in this process and nobody has closed yet.
    opened: ClassVar[World | None] = None
    # What `init` opened, and the backend that it chose.
    owned: Owned | None
    wanted_backend = "gloo"

    def __init__(self, env: RankEnv, device: torch.device, group: dist.ProcessGroup, owned: Owned | None) -> None:
        make_forks_safe()
        if device.type == "cpu":
            keep_freed_memory()
        activity.now.failure = ""  # may be left from an earlier world
        self.device = device
        # Returns whether a rank was lost and another generation of the world has begun.
        self.is_cut: Callable[[], bool] = lambda: False
        # Called when this process leaves the job, with whether it has completed its part.
        self.leave: Callable[[bool], object] = lambda is_complete: None
        self.enter(env, group, owned)

    def enter(self, env: RankEnv, group: dist.ProcessGroup, owned: Owned | None) -> None:
        """Describe another default group from now on, in which this rank may have another number."""
        self.rank = env.rank
        self.local_rank = env.local_rank
        self.world_size = env.world_size
        self.local_world_size = env.local_world_size
        self.node_rank = env.node_rank
        self.backend: str = backend_name(group)
        self.group = group
        self.owned = owned
        # By the name of the group, which is the same on all its ranks; a subgroup has its own keys.
        self._store = PrefixStore(f"lockstep/sync/{group.group_name}", torch_internals.default_store())

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None = None, *, device: str | torch.device | None = None) -> World:
        """Describe a process group that exists already; closing this world leaves the group as it is.

        Args:
            group: The default process group if ``None``.
            device: As for `init`; ``None``: the device that the group is bound to.

        Raises:
            ConfigurationError: There is no such process group, or no such device.
        """
        group = group if group is not None else dist.group.WORLD
        if group is None or not dist.is_initialized():
            raise ConfigurationError("This process has no process group.\nCall lockstep.init(), which makes one.")
        env = _env_of(group)
        return cls(env, choose_device(env, device or group.bound_device_id), group, None)

    @property
    def is_late(self) -> bool:
        """Whether this process prepares alone to take a place in a job that runs; see comm/generations.py."""
        return rendezvous.JOINS in os.environ and self.owned is not None

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
        """Wait until every rank has called this.

        Collective: every rank. Blocks at most ``timeout_s``. Synchronizes the processes, not their devices: work that
        was queued on a GPU may still be running.

        Raises:
            CollectiveError: Ranks did not arrive in time; names them.
        """
        # Through the store: this uses no device, and the missing ranks are known.
        store, number = self._store, self._count("barrier")
        store.set(f"barrier/{number}/{self.rank}", "")
        if store.add(f"barrier/{number}/count", 1) == self.world_size:
            store.set(f"barrier/{number}/{_DONE}", "")
        if not self._wait_for_key(f"barrier/{number}/{_DONE}", timeout_s, "World.barrier"):
            raise CollectiveError(
                f"Rank {self.rank} waited {timeout_s:g} s in World.barrier() number {number}; "
                f"missing: {self._missing_in_barrier(number)}.\n"
                "Those ranks ended, are stuck, or do not call barrier() as often as the others; "
                "if they are only slow, pass a longer timeout_s."
            )
        # All ranks have entered this barrier, so all have left the previous one: its keys are not needed any more.
        for key in (self.rank, "count", _DONE) if self.rank == 0 else (self.rank,):
            store.delete_key(f"barrier/{number - 1}/{key}")

    def _missing_in_barrier(self, number: int) -> str:
        store, keys = self._store, {f"barrier/{number}/{rank}": rank for rank in range(self.world_size)}

        def find() -> str:
            return activity.format_ranks([keys[key] for key in keys.keys() - read_present(store, list(keys), set())])

        # Ranks that arrive after this must not read that they are missing.
        num_present = store.add(f"barrier/{number}/count", 0)
        return rendezvous.find_once(store, f"barrier/{number}/missing/{num_present}", find, self.world_size)

    @contextmanager
    def rank_zero_first(
        self, *, local: bool = False, timeout_s: float = BARRIER_TIMEOUT_S
    ) -> Iterator[Callable[[], object]]:
        """Run the block on rank zero first, and then on the others, for example for a download into a shared cache.

        Collective: every rank. The others block until rank zero has left the block, at most ``timeout_s``, or has
        called what ``as`` returns.

        Args:
            local: Run it first on the first rank of each machine, for files that the machines do not share.
            timeout_s: How long the others wait.

        Raises:
            RankFailed: The first rank failed in the block; raised on the ranks that waited.
            CollectiveError: It did not finish in time.
        """
        leader = f"local rank 0 of node {self.node_rank}" if local else "rank 0"
        key = f"{leader}/{self._count(leader)}"
        if (self.local_rank if local else self.rank) == 0:
            outcome = _DONE
            try:
                yield partial(self._store.set, key, _DONE)
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._store.set(key, outcome)
            return
        if not self._wait_for_key(key, timeout_s, "World.rank_zero_first"):
            raise CollectiveError(
                f"Rank {self.rank} waited {timeout_s:g} s for {leader} to finish its rank_zero_first() block.\n"
                "It ended, is stuck, or never reached the block; if it is only slow, pass a longer timeout_s."
            )
        # The key stays: other ranks of this machine may read it later.
        outcome = self._store.get(key).decode()
        if outcome != _DONE:
            raise RankFailed(f"{leader.capitalize()} failed in its rank_zero_first() block: {outcome}")
        yield bool

    def _count(self, event: str) -> int:
        """Return how often this rank has done ``event``; kept in the store, so that all worlds of a group share it."""
        return self._store.add(f"{event}/of/{self.rank}", 1)

    def _wait_for_key(self, key: str, timeout_s: float, operation: str) -> bool:
        with activity.waiting(operation):
            has_key = rendezvous.await_key(self._store, key, timeout_s, self.world_size, self.is_cut)
        if self.is_cut():
            raise CollectiveError(f"Rank {self.rank} waited in {operation}() for a rank that was lost.")
        return has_key

    def close(self) -> None:
        """Leave the process group if `init` created it; a second call has no effect.

        Blocks some seconds at most; on devices, until all ranks close it, half an hour at most.
        """
        self._close(abort=False)

    def _close(self, *, abort: bool, at_exit: bool = False) -> None:
        owned, self.owned = self.owned, None
        self.leave(not abort)
        if owned is not None:
            World.opened = None
            atexit.unregister(self._close_at_exit)
            met, undo = owned
            store = PrefixStore(met.prefix, met.store)
            abort |= self.device.type != "cpu" and self._is_left_alone(store, fails=abort, waits=not (abort or at_exit))
            destroy_default_group(abort=abort, at_exit=at_exit)
            undo.close()
            with suppress(dist.DistError):  # The host of the store may be gone already.
                store.add("left", 1)
                if met.is_host and not abort:
                    pause_s = rendezvous.poll_interval_s(self.world_size)
                    rendezvous.poll_until(lambda: store.add("left", 0) >= self.world_size, _FAREWELL_S, pause_s)

    def _is_left_alone(self, store: PrefixStore, *, fails: bool, waits: bool) -> bool:
        """Return whether a rank has failed. If ``waits``, block until all ranks close this world, or one fails.

        Destroying a communicator of NCCL is a collective, but ranks may end minutes apart: one of them may evaluate, or
        upload a checkpoint. A rank that is killed is not found here; the launcher then ends the others.
        """
        size, pause_s = self.world_size, rendezvous.poll_interval_s(self.world_size)
        with suppress(dist.DistError), activity.waiting(activity.CLOSE):
            store.add("leaving", size if fails else 1)  # with a rank that fails, the sum is larger than `size`
            if not waits or rendezvous.poll_until(lambda: store.add("leaving", 0) >= size, BARRIER_TIMEOUT_S, pause_s):
                return store.add("leaving", 0) > size
        return True  # the host of the store has ended, or a rank is stuck

    def _close_at_exit(self) -> None:
        # The interpreter sets it when an exception ended the script: the other ranks may be waiting in a collective.
        self._close(abort=getattr(sys, "last_value", None) is not None, at_exit=True)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, Exception) and self.owned is not None:
            activity.now.fail(error)
        self._close(abort=error is not None)

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, world_size={self.world_size}, local_rank={self.local_rank}, "
            f"node_rank={self.node_rank}, device={str(self.device)!r}, backend={self.backend!r})"
        )


def init(*, backend: str | None = None, device: str | torch.device | None = None, timeout_s: float = 60.0) -> World:
    """Join the ranks that were started with this one, and return the world they form.

    Reads the environment variables of torchrun, SLURM, MPI or Kubernetes. Without any of them it returns a world of one
    rank, which needs no address. Sets the device before anything uses it. If this process already has a process group,
    the world describes that one, and closing the world keeps the group.

    Collective: every rank. Blocks until all ranks have called it.

    Args:
        backend: If ``None``: torch's default for the device, such as ``nccl`` for CUDA; for CPUs ``shm`` where all
            ranks can share memory, else ``gloo``.
        device: If ``None``: the accelerator of this local rank if there are accelerators, else the CPU.
        timeout_s: How long to wait for the other ranks.

    Raises:
        WorldSizeMismatch: A rank is missing or joined twice; raised on every rank that joined, and names those ranks.
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
    # Before any use of the device, so that a wrong environment is an error of its own.
    env = RankEnv.from_environ(os.environ)
    if env.launcher is Launcher.SLURM and env.local_world_size > 1:
        check_step()
    # One limit for all stages: after a long wait for the store, less time is left to wait for the ranks.
    deadline = time.monotonic() + timeout_s
    met = rendezvous.join_rendezvous(env, timeout_s)
    me = rendezvous.Participant(env.rank, env.world_size, "", socket.gethostname(), os.getpid())
    meet = partial(rendezvous.check_membership, deadline=deadline, timeout_s=timeout_s, is_host=met.is_host)
    with rendezvous.naming_a_lost_store(me):
        if env.rank == 0:
            # Of ranks before a restart, if the store outlives them: NCCL would wait for minutes and end this process.
            met.store.delete_key(torch_internals.EXCEPTION_DUMP)
        if env.launcher is Launcher.ENV:
            meet(PrefixStore(f"{met.prefix}/hosts", met.store), me)  # names missing ranks
            env = _on_its_machine(env, PrefixStore(f"{met.prefix}/hosts", met.store))
        chosen, name, objection = torch.device("cpu"), "", None
        try:
            chosen = choose_device(env, device)
            name = choose_backend(chosen, backend)
            _allow_connections(env, name)
        except LockstepError as error:
            if env.world_size == 1:
                raise
            objection = str(error)  # the membership check raises it, on the other ranks as well
        # c10d would also wait for missing ranks, but would not name them. Ranks with different backends would hang in
        # their first collective.
        if objection is not None and rendezvous.JOINS in os.environ:
            raise ConfigurationError(objection)
        if env.world_size > 1 and rendezvous.JOINS not in os.environ:
            meet(PrefixStore(f"{met.prefix}/members", met.store), me._replace(backend=name), objection=objection)
    with ExitStack() as stack:
        alone = replace(env, rank=0, local_rank=0, world_size=1, local_world_size=1)
        is_late = rendezvous.JOINS in os.environ
        store: dist.Store = HashStore() if is_late else PrefixStore(met.prefix, met.store)
        group = form_group(alone if is_late else env, store, name, chosen, timeout_s, stack)
        undo = stack.pop_all()
    # Groups that are created later exchange addresses through the store, and wait for each other there.
    met.store.set_timeout(default_pg_timeout)
    world = World(env, chosen, group, (met, undo))
    world.wanted_backend, World.opened = name, world
    # A script may end without closing its world.
    atexit.register(world._close_at_exit)
    return world


# The values that `seed` was given, by what it has set on this rank.
shared_seeds: dict[int, int] = {}


def seed(world: World, value: int) -> None:
    """Seed ``random``, numpy and torch on all devices, differently on each rank; processes of loaders follow from it.

    Dropout and augmentation then differ between the ranks, as they do between the samples of one device. What must be
    equal does not depend on it: the order of a `DistributedSampler` follows from its own ``seed``, and
    `DistributedDataParallel` sends the weights of rank zero, which draws the numbers of ``torch.manual_seed(value)``.

    Args:
        world: The world of this rank.
        value: From 0 to 2**32 - 1; the same on every rank.
    """
    rank_seed = value if world.rank == 0 else int(np.random.SeedSequence([value, world.rank]).generate_state(1)[0])
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    shared_seeds[rank_seed] = value


def _on_its_machine(env: RankEnv, store: dist.Store) -> RankEnv:
    """Return ``env`` with the local rank and world size, found from the hosts of all ranks. Collective: every rank."""
    machines = enumerate(hierarchy.find_machines(store, env.rank, env.world_size))
    node_rank, ranks = next((number, ranks) for number, ranks in machines if env.rank in ranks)
    return replace(env, local_rank=ranks.index(env.rank), local_world_size=len(ranks), node_rank=node_rank)


def _allow_connections(env: RankEnv, backend: str) -> None:
    """Check the limit of open files before Gloo connects each rank to every other one, and all of them to the store."""
    is_mesh = "gloo" in backend or (backend == "shm" and env.local_world_size < env.world_size)
    num_machines = env.world_size // env.local_world_size  # carriers connect once more, see hierarchy.py
    num_files = is_mesh * (env.world_size + num_machines) + (env.rank == 0) * env.world_size
    network.allow_open_files(num_files, f"Rank {env.rank} of {env.world_size}, which is connected to all others,")


def _env_of(group: dist.ProcessGroup) -> RankEnv:
    """Return this rank's place in ``group``; if the environment does not describe it, all ranks count as local."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with suppress(ConfigurationError):  # the group was created without these variables: they may be inconsistent
        env = RankEnv.from_environ(os.environ)
        if (env.rank, env.world_size) == (rank, world_size):
            return env
    return RankEnv(rank, rank, world_size, world_size, 0, None, None, Launcher.NONE)
