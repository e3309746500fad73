"""Bring up the default process group: choose the device, meet the other ranks, connect; and undo all of it."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from lockstep.comm.hardware import choose_backend, choose_device
from lockstep.comm.interfaces import GLOO_INTERFACE, gloo_interface, told_gloo
from lockstep.comm.link import probe_connections
from lockstep.comm.meeting import Meeting, open_meeting
from lockstep.comm.roll_call import Arrival, call_roll, pause_s
from lockstep.comm.shm.founding import why_not
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.comm.teardown import destroy_default_group
from lockstep.env import RankEnv
from lockstep.errors import CollectiveError, LockstepError, WorldSizeMismatch

_GLOO_CONNECT_FACTOR = 5
"""Gloo waits this many times its timeout for a connection."""

_FAREWELL_S = 5.0
"""How long the host of the store waits at the end for ranks that still use it."""


@dataclass
class Session:
    """What `start` opened, to be ended once."""

    meeting: Meeting
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
                time.sleep(pause_s(self.world_size))


def start(
    env: RankEnv, *, backend: str | None, device: str | torch.device | None, timeout_s: float
) -> tuple[Session, torch.device]:
    """Make the default process group of this job; returns what ends it, and this rank's device.

    Collective: every rank. Blocks until all have come, at most about ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    chosen, name, objection = _choose(env, backend, device)
    if objection is not None and env.world_size == 1:
        raise objection
    meeting = open_meeting(env, timeout_s)
    if env.world_size > 1:
        _meet(env, meeting, name, objection, deadline, timeout_s)
    one_machine = env.local_world_size == env.world_size
    if backend is None and name == "shm":
        name = _shm_or_gloo(env, PrefixStore(f"{meeting.prefix}/shm", meeting.store), expected=one_machine)
    with ExitStack() as stack:
        stack.enter_context(told_gloo(gloo_interface(env.master_addr, one_machine=one_machine)))
        _connect(env, meeting, name, chosen, timeout_s)
        if not one_machine:
            probe_connections()
        undo = stack.pop_all()
    # The limit until here was for connecting; a collective may wait longer for a slow rank.
    limit = (default_pg_nccl_timeout if name == "nccl" else None) or default_pg_timeout
    group = dist.group.WORLD
    if isinstance(group, ShmProcessGroup):
        group.set_timeout(limit)  # torch's function knows its own backends only
    else:
        dist.distributed_c10d._set_pg_timeout(limit)
    meeting.store.set_timeout(default_pg_timeout)
    return Session(meeting, PrefixStore(meeting.prefix, meeting.store), env.world_size, undo), chosen


def _choose(
    env: RankEnv, backend: str | None, device: str | torch.device | None
) -> tuple[torch.device, str, LockstepError | None]:
    """Choose device and backend; what is wrong with them is returned, as the other ranks shall hear of it too."""
    try:
        chosen = choose_device(env, device)
        return chosen, choose_backend(chosen, backend), None
    except LockstepError as error:
        return torch.device("cpu"), "", error


def _meet(
    env: RankEnv, meeting: Meeting, backend: str, objection: LockstepError | None, deadline: float, timeout_s: float
) -> None:
    try:
        call_roll(
            PrefixStore(f"{meeting.prefix}/roll", meeting.store),
            Arrival(env.rank, env.world_size, backend, socket.gethostname(), os.getpid()),
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
    """Return ``shm`` if all ranks can map one memory, else ``gloo``; say so if they were ``expected`` to.

    Collective: every rank. Blocks until all have come.
    """
    reason = why_not(store, env.rank, env.world_size)
    if reason and expected and env.rank == 0:
        print(f"lockstep: Gloo serves this job, which is slower than shared memory: {reason}.", file=sys.stderr)
    return "gloo" if reason else "shm"


def _connect(env: RankEnv, meeting: Meeting, backend: str, device: torch.device, timeout_s: float) -> None:
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
