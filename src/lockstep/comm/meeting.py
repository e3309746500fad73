"""Open the key-value store in which the ranks meet, and say clearly why when it cannot be opened."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from lockstep.comm.hosting import listen
from lockstep.comm.interfaces import is_local
from lockstep.env import RankEnv, is_loopback
from lockstep.errors import ConfigurationError, WorldSizeMismatch

STAND_IN_AFTER = 0.5
"""The part of the timeout after which another rank on rank zero's machine hosts the store in its stead."""

_RETRY_S = 0.1
_MARK = "lockstep/hosted"


@dataclass(frozen=True)
class Meeting:
    """An open store; ``is_host`` says that its server lives in this process and ends with it."""

    store: Store
    is_host: bool
    prefix: str
    hint: str = ""
    """What may keep the others away, for the message if they do not come."""


_hosted: dict[tuple[str, int], Store] = {}
"""Servers of this process. They live as long as it does, so that a second world finds the same one."""

_num_meetings: dict[tuple[str, int], int] = {}


def open_meeting(env: RankEnv, timeout_s: float) -> Meeting:
    """Connect to the store of this job; rank zero, or a stand-in when it does not come, hosts it.

    Blocks until connected, at most ``timeout_s``.

    Raises:
        ConfigurationError: The port is taken.
        WorldSizeMismatch: Nobody hosts the store, so rank zero did not come or cannot be reached.
    """
    if env.master_addr is None or env.master_port is None:
        return Meeting(HashStore(), is_host=False, prefix="lockstep")
    place = (env.master_addr.strip("[]"), env.master_port)
    prefix = f"lockstep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _connect(env, place, timeout_s, may_host=False).store
        prefix = f"{prefix}/{env.world_size}"
        # torchrun's store outlives its workers: the n-th time that this rank starts belongs to the n-th round.
        return Meeting(store, is_host=False, prefix=f"{prefix}/{store.add(f'{prefix}/starts/{env.rank}', 1)}")
    _num_meetings[place] = _num_meetings.get(place, 0) + 1
    prefix = f"{prefix}/{_num_meetings[place]}"
    if place in _hosted:
        return Meeting(_hosted[place], is_host=True, prefix=prefix)
    if env.rank == 0:
        opened = _open_as_rank_zero(env, place, timeout_s)
    else:
        opened = _connect(env, place, timeout_s, may_host=True)
    hint = ""
    if env.rank == 0 and opened.is_host and not is_local(place[0]):
        hint = f"Rank 0 runs on {socket.gethostname()}, but MASTER_ADDR={place[0]} is no address of that machine."
    return Meeting(opened.store, opened.is_host, prefix, hint)


@dataclass(frozen=True)
class _Opened:
    store: Store
    is_host: bool


def _open_as_rank_zero(env: RankEnv, place: tuple[str, int], timeout_s: float) -> _Opened:
    try:
        return _Opened(_host(env, place, timeout_s), is_host=True)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigurationError(_cannot_host(place, error)) from None
    # It may be a stand-in for us, or another process that calls itself rank zero: the roll call tells.
    store = _client(env, place, min(timeout_s, 3.0))
    if store is None or not _is_ours(store):
        raise ConfigurationError(
            f"Port {place[1]} on {place[0]} is already in use by another program.\n"
            "Set MASTER_PORT to a free port, the same on every rank; `lockstep run` finds one by itself."
        )
    return _Opened(store, is_host=False)


def _connect(env: RankEnv, place: tuple[str, int], timeout_s: float, *, may_host: bool) -> _Opened:
    start = time.monotonic()
    while True:
        reason = _refusal(place)
        elapsed_s = time.monotonic() - start
        if reason is None:
            store = _client(env, place, max(1.0, timeout_s - elapsed_s))
            if store is not None:
                return _Opened(store, is_host=False)
            reason = "something else than a torch.distributed store answers there"
        elif may_host and elapsed_s >= timeout_s * STAND_IN_AFTER and is_local(place[0]):
            with suppress(OSError):
                return _Opened(_host(env, place, timeout_s), is_host=True)
        if elapsed_s >= timeout_s:
            host = "Rank 0" if may_host else "The launcher of the first machine"
            raise WorldSizeMismatch(
                f"Rank {env.rank} of {env.world_size} could not reach the store at {place[0]}:{place[1]} "
                f"within {timeout_s:g} s: {reason}.\n"
                f"{host} hosts it, so that is missing, has given up already, or cannot be reached from "
                f"{socket.gethostname()}; which other ranks are missing cannot be known.\n"
                "Check that it was started, that MASTER_ADDR and MASTER_PORT are the same on every rank, and that "
                "no firewall lies between."
            )
        time.sleep(_RETRY_S)


def _host(env: RankEnv, place: tuple[str, int], timeout_s: float) -> Store:
    """Start the server in this process; raises ``OSError`` when it cannot listen."""
    loopback = is_loopback(place[0])
    listener = listen(place[0] if loopback else "", place[1])
    store = TCPStore(
        # Behind a forwarded address, the server's own machine may not reach it by that.
        listener.getsockname()[0] if loopback else "localhost",
        place[1],
        env.world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # Bound here and handed over: so the error is Python's own, and a local job is not open to the network.
        master_listen_fd=listener.detach(),
    )
    store.set(_MARK, "")
    _hosted[place] = store
    return store


def _client(env: RankEnv, place: tuple[str, int], timeout_s: float) -> Store | None:
    """Connect to the server, or return ``None`` if what answers there is none.

    In a thread, which is left behind when the time is up: torch's client waits without limit for the answer of a
    program that accepts connections and says nothing.
    """
    found: list[Store] = []

    def connect() -> None:
        with suppress(dist.DistError):
            found.append(TCPStore(*place, env.world_size, is_master=False, timeout=timedelta(seconds=timeout_s)))

    thread = threading.Thread(target=connect, name="lockstep-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def _is_ours(store: Store) -> bool:
    """Say whether a rank of ours hosts the store; it may have opened it only just now."""
    deadline = time.monotonic() + 1.0
    while not store.check([_MARK]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_S)
    return True


def _refusal(place: tuple[str, int]) -> str | None:
    """Return why nothing answers at ``place``, or ``None`` if something does.

    Asked before torch's own client, which logs every attempt.
    """
    try:
        socket.create_connection(place, timeout=1.0).close()
    except socket.gaierror as error:
        return f"the name {place[0]!r} cannot be resolved ({error.strerror})"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _cannot_host(place: tuple[str, int], error: OSError) -> str:
    return (
        f"Rank 0 cannot listen on port {place[1]}: {error.strerror}.\n"
        "Set MASTER_PORT to a free port above 1023, the same on every rank."
    )
