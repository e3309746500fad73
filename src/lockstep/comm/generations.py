"""Generations: how the ranks of a job go on together after one of them was lost.

[Note: generations]
A generation is a set of processes with a number, which their launcher decides and posts in its folder. A process
belongs to the newest one that it has joined. If a newer one is posted, its groups are of no use any more:

    launcher                     a rank that is left                    a new rank, or a spare
    notices the death            a collective fails, or the thread      init() gave it a group of its own: it builds
    forks a rank                 `_watch` makes it fail                 model, data and engine alone
    posts generation N  ------>  leaves its groups                      finds its process in generation N
                                 meets the others in the store under N  the same
                                 makes the groups again                 the same

What the groups served (engines, loaders) is connected to the new ones by its owner. If a process of N is lost before
all have met, N + 1 is posted, and whoever still waits for N, or connects its device, goes on to that. A connection over
the network has a limit of its own. A process that is in no generation any
more was replaced: it ends. So there is one rule for each moment, also for a loss during a recovery.

Ranks that train alone between exchanges (local-sgd, diloco) find a generation only when they exchange. So that they
never wait for a new rank, N is then posted without it, and N + 1 with it when it has built everything. A rank that was
too slow is left out of a generation in the same way.
"""

import math
import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lockstep.base import activity, rank_files
from lockstep.base.env import RankEnv, machine_timeout_s
from lockstep.base.rank_files import SPARE, Arrival, Generation
from lockstep.base.torch_internals import abort_together, backend_of, forget_groups, process_groups
from lockstep.comm import network
from lockstep.comm.collectives import launching
from lockstep.comm.rendezvous import JOINS, poll_interval_s, poll_until
from lockstep.comm.shm.process_group import CpuProcessGroup
from lockstep.comm.store import open_store
from lockstep.comm.world import BARRIER_TIMEOUT_S, World, destroy_default_group, form_group
from lockstep.errors import CollectiveError, LockstepError

# How often a rank looks for a new generation; and how long after an error in a collective it waits for one. The
# launcher may be late on a busy machine; it ends all ranks if there is to be none.
_PERIOD_S, _PATIENCE_S = 0.02, 30.0
# How long the ranks of a generation, who have all met, may take to connect.
_CONNECT_S = 15.0
# How long a thread that aborts waits for one that launches a collective, which takes microseconds unless it is stuck.
_LAUNCH_S = 1.0
# How often a process that waits for its place says so.
_REPORT_S = 60.0


class Replaced(LockstepError):
    """This process is not a member of the job any more, as another one has its rank."""


class Membership:
    """This process as a member of the generations of its job; see [Note: generations].

    Args:
        world: The ranks; changed by each generation.
        arrival: Of a rank that trains alone between exchanges.

    Attributes:
        number: The generation that this process has joined.
        is_used: Whether this process has one already, or had one. A process that takes the place of a lost rank runs
            the program from its start, so it cannot take part in another one.
    """

    is_used = False

    def __init__(self, world: World, arrival: Arrival | None = None) -> None:
        folder = rank_files.launcher_folder()
        assert folder is not None, "only processes of our launcher have one"
        self._world, self._folder, self._arrival = world, folder, arrival
        self.number = 0
        Membership.is_used = network.may_cut = True
        self._cut, self._lock = 0, threading.Lock()
        self._ends, self._is_apart, self._has_announced = threading.Event(), False, False
        world.is_cut, world.leave = lambda: self.is_cut, self.close
        if JOINS in os.environ:
            self._announce()
        threading.Thread(target=self._watch, name="lockstep-generations", daemon=True).start()

    def close(self, is_complete: bool = True) -> None:
        """Stop to follow the generations; ``is_complete``: as this rank has completed its part of the job."""
        self._ends.set()
        rank_files.withdraw_recovery(self._folder, os.getpid(), is_complete=is_complete)

    def _announce(self, generation: int = -1) -> None:
        if self._arrival is not None:
            self._arrival = replace(self._arrival, generation=generation, time_ns=time.time_ns())
        rank_files.announce_recovery(self._folder, os.getpid(), self._arrival)
        self._has_announced = True

    def join(self, number: int) -> None:
        """Report to the launcher that this process can go on in place from now on, with its first attempt.

        Collective in the first attempt: every rank. Blocks until all have come to theirs: a rank that is lost before
        the others have reported this would restart them. If ranks train alone between attempts, does not block, and
        reports that this one has come to attempt ``number``.
        """
        if self._arrival is not None:
            self._arrival, self._is_apart = replace(self._arrival, number=number), False
            self._announce()
            self._check_newer()
        elif not self._has_announced:
            self._announce()
            with suppress(CollectiveError):  # a rank was lost meanwhile: the attempt fails in its first collective
                self._world.barrier()

    def leave(self) -> None:
        """Leave the groups as they are until the next attempt, if ranks train alone until then."""
        self._is_apart = self._arrival is not None

    @property
    def is_cut(self) -> bool:
        """Whether the groups of this generation were made to fail."""
        return self._cut > self.number

    def newer(self) -> Generation | None:
        """Return the newest generation if this process has not joined it yet."""
        generation = Generation.read(self._folder)
        # A new process waits until there is one that it belongs to: it was started before that was agreed on.
        is_early = generation is not None and JOINS in os.environ and os.getpid() not in generation.ranks
        return generation if generation is not None and generation.number > self.number and not is_early else None

    def await_newer(self, limit_s: float | None = None) -> Generation | None:
        """Wait for a generation that this process has not joined, at most ``limit_s``; by default some seconds."""
        if limit_s is None:
            limit_s = max(_PATIENCE_S, 2 * machine_timeout_s())
        # A new process, or a spare, has no generation yet that could be broken.
        if self.newer() is None and (self.number > 0 or JOINS not in os.environ):
            rank_files.report_broken(self._folder, os.getpid(), self.number)
            if self._world.local_world_size < self._world.world_size:
                # So that the ranks of other machines, which may wait for this one, notice it, too.
                interrupt_groups()
        poll_until(lambda: self.newer() is not None, limit_s, _PERIOD_S)
        return self.newer()

    def _watch(self) -> None:
        """Make the calls of this process fail when a newer generation is posted."""
        # A survivor may wait for another one, which has left; and on a device no call fails by itself.
        while not self._ends.wait(_PERIOD_S):
            if not self._is_apart:
                self._check_newer()

    def _check_newer(self) -> None:
        generation = self.newer()
        with self._lock:
            if generation is not None and generation.number > self._cut:
                self._cut = generation.number
                interrupt_groups()

    def rejoin(self) -> Generation:
        """Leave the groups of this generation, and make those of the newest one with its other ranks.

        Collective: every process of the newest generation. Blocks until all have come, at most `BARRIER_TIMEOUT_S`; and
        before, as long as the launcher runs, until a process that waits for its place is in one.

        Raises:
            Replaced: This process is not among them.
            CollectiveError: They did not meet in time, or the job has ended.
        """
        deadline = math.inf if JOINS in os.environ else time.monotonic() + BARRIER_TIMEOUT_S
        while True:
            # The others may build, evaluate or save for long. If the launcher is killed, the kernel kills this process.
            while (newest := self.await_newer(min(deadline - time.monotonic(), _REPORT_S))) is None:
                if not self._folder.is_dir():
                    raise CollectiveError("The job has ended in which this process waited for its place.")
                if time.monotonic() >= deadline:
                    raise CollectiveError("No other rank took the place of the lost one in time.")
                activity.log(f"rank {rank_files.own_name()} still waits for the other ranks to go on with it")
            is_member = os.getpid() in newest.ranks
            if not (is_member or os.getpid() in newest.waiting or JOINS in os.environ):
                raise Replaced(f"Process {os.getpid()} was replaced: generation {newest.number} goes on without it.")
            with self._lock:
                self._cut = self.number = newest.number
                interrupt_groups()
            self._announce(newest.number)
            deadline = time.monotonic() + BARRIER_TIMEOUT_S if is_member else math.inf
            if is_member:
                destroy_default_group(abort=True, at_exit=False, is_cut=True)
                forget_groups()
                with activity.waiting(activity.REJOIN), suppress(_Superseded):
                    self._enter(newest, deadline)
                    return newest

    def _enter(self, newest: Generation, deadline: float) -> None:
        """Meet the other processes of a generation, and create the default group with them."""
        world = self._world
        assert world.owned is not None, "made by `init`"
        met, undo = world.owned
        numbers, number, num_waiting = sorted(newest.ranks.values()), newest.ranks[os.getpid()], len(newest.waiting)
        first = numbers[0] if newest.num_nodes > 1 else 0
        env = replace(
            RankEnv.from_environ(os.environ),
            rank=number,
            world_size=newest.world_size,
            local_rank=number - first,
            local_world_size=len(numbers) + num_waiting,
            node_rank=newest.node_rank,
        )
        _take_number(env)
        # In the group, the ranks after one that waits have lower numbers.
        place, size = numbers.index(number), env.world_size - num_waiting
        env = replace(env, rank=first + place, world_size=size, local_rank=place, local_world_size=len(numbers))
        prefix = f"lockstep/generation/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{newest.number}"
        base = met.store
        if newest.store is not None:
            # A store for this start of the job, which some of its machines may have joined later.
            prefix, base = f"lockstep/generation/{newest.number}", open_store(newest.store, _CONNECT_S)
            env = replace(env, master_addr=newest.store[0])
        store = dist.PrefixStore(prefix, base)
        store.set(f"here/{env.rank}", "")
        keys = [f"here/{rank}" for rank in range(env.world_size)]

        def have_all_come() -> bool:
            if self.newer() is not None:
                raise _Superseded
            return store.check(keys)

        pause_s = poll_interval_s(env.world_size)
        if not poll_until(have_all_come, deadline - time.monotonic(), min(pause_s, _PERIOD_S)):
            raise CollectiveError(f"Rank {env.rank} waited too long for the other ranks of generation {newest.number}.")
        base.set_timeout(timedelta(seconds=_CONNECT_S))
        try:
            undo.close()
            with ExitStack() as stack:
                arguments = env, store, world.wanted_backend, world.device
                group = form_group(*arguments, _CONNECT_S, stack, lambda: self.newer() is not None)
                if self.newer() is not None:  # `interrupt_groups` was called when it could not find this group yet
                    raise _Superseded
                undone = stack.pop_all()
        except (CollectiveError, dist.DistError, RuntimeError):
            # A rank was lost while they connected: its launcher posts the next generation.
            if self.await_newer() is None:
                raise
            raise _Superseded from None
        finally:
            base.set_timeout(default_pg_timeout)
        world.enter(env, group, (met._replace(store=base, is_host=False, prefix=prefix), undone))
        os.environ.pop(JOINS, None)


def _take_number(env: RankEnv) -> None:
    """Make the variables, files and title of this process those of its rank, which may be another one than before."""
    before, os.environ["WORLD_SIZE"] = rank_files.own_name(), str(env.world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(env.local_world_size)
    if before == str(env.rank):
        return
    os.environ.update(RANK=str(env.rank), ROLE_RANK=str(env.rank), LOCAL_RANK=str(env.local_rank))
    os.environ.pop(SPARE, None)
    if activity.now.on_rank is not None:
        activity.now.on_rank(before)


class _Superseded(Exception):
    """A newer generation was posted."""


def interrupt_groups() -> None:
    """Make all calls on the process groups of this process fail, also calls that other threads are in."""
    network.cut_links()
    on_devices: list[Any] = []
    for group in process_groups():
        if isinstance(group, CpuProcessGroup):
            group.interrupt()
            continue
        # Not Gloo's, which would never end what waits: its connections are shut down.
        for device in group._device_types:
            if device.type != "cpu":
                with suppress(RuntimeError):  # it has been destroyed meanwhile
                    on_devices.append(backend_of(group, device))
    if on_devices:
        # NCCL allows one thread at a time; but the thread that launches may itself wait for the lost rank.
        is_held = launching.acquire(timeout=_LAUNCH_S)
        try:
            abort_together(on_devices)
        finally:
            if is_held:
                launching.release()
