"""Bring up the default process group: choose the device, meet the other ranks, connect; and undo all of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from lockstep.comm.hardware import choose_backend, choose_device
from lockstep.comm.meeting import Meeting, open_meeting
from lockstep.comm.roll_call import POLL_S, Arrival, call_roll
from lockstep.comm.teardown import destroy_default_group
from lockstep.env import RankEnv
from lockstep.errors import LockstepError

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
                time.sleep(POLL_S)


def start(
    env: RankEnv, *, backend: str | None, device: str | torch.device | None, timeout_s: float
) -> tuple[Session, torch.device]:
    """Make the default process group of this job; returns what ends it, and this rank's device.

    Collective: every rank. Blocks until all have come, at most about ``timeout_s``.
    """
    objection: LockstepError | None = None
    chosen, name = torch.device("cpu"), backend or ""
    try:
        chosen = choose_device(env, device)
        name = choose_backend(chosen, backend)
    except LockstepError as error:
        objection = error
    deadline = time.monotonic() + timeout_s
    if objection is not None and env.world_size == 1:
        raise objection
    meeting = open_meeting(env, timeout_s)
    if env.world_size > 1:
        me = Arrival(env.rank, env.world_size, name, socket.gethostname(), os.getpid())
        call_roll(
            PrefixStore(f"{meeting.prefix}/roll", meeting.store),
            me,
            deadline=deadline,
            timeout_s=timeout_s,
            is_host=meeting.is_host,
            hint=meeting.hint,
            objection=None if objection is None else str(objection),
        )
    with ExitStack() as stack:
        if env.local_world_size == env.world_size:
            stack.enter_context(_gloo_on_loopback())
        dist.init_process_group(
            name,
            store=PrefixStore(f"{meeting.prefix}/group", meeting.store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(seconds=timeout_s),
            # Binds the communicator to the device now, so that no collective has to guess it.
            device_id=chosen if name == "nccl" else None,
        )
        undo = stack.pop_all()
    # The limit above was for connecting; a collective may wait longer for a slow rank.
    limit = (default_pg_nccl_timeout if name == "nccl" else None) or default_pg_timeout
    dist.distributed_c10d._set_pg_timeout(limit)
    meeting.store.set_timeout(default_pg_timeout)
    return Session(meeting, PrefixStore(meeting.prefix, meeting.store), env.world_size, undo), chosen


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Have Gloo use the loopback interface, unless the user chose one.

    Ranks of one machine need no other, and the one that belongs to the host name may not exist or may be filtered.
    """
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((found for _, found in socket.if_nameindex() if found in ("lo", "lo0")), None)
    if name in os.environ or loopback is None:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        os.environ.pop(name, None)
