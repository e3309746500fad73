"""Where the launchers of a job's machines meet, and the store in which their ranks find each other."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.run import parse_min_max_nnodes

from lockstep.comm.network import GLOO_INTERFACE, gloo_interface, is_local, reachable_address
from lockstep.comm.rendezvous import LOOPBACK, prefixed_store, start_store_server
from lockstep.errors import ConfigurationError, LockstepError

# How the launcher of a single machine meets: with nobody, at a port of the loopback interface.

LOCAL_BACKEND = "lockstep-local"
"""The name under which torch elastic knows it."""

_STORE_TIMEOUT_S = 600.0


class LocalRendezvous(RendezvousHandler):
    """Stands in for elastic's ``c10d`` rendezvous, whose store listens at every address of the machine."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return LOCAL_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next round, in a store of its own: see [Note: a store for each round] in rounds.py."""
        self._store, port = start_store_server(LOOPBACK, _STORE_TIMEOUT_S)
        return RendezvousInfo(prefixed_store(self._store, "launcher"), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """Nobody else can close it."""
        return False

    def set_closed(self) -> None:
        """Nobody else needs to know."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the port closes with this object."""
        return True


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


rendezvous_handler_registry.register(LOCAL_BACKEND, _make)


# torch elastic's rendezvous, with a store for each round in which the ranks of all its machines find each other.
#
# [Note: a store for each round]
# Machines meet anew whenever ranks are started again: that is a round. Ranks then meet in a store that the launcher of
# the first machine hosts. torch's launchers host one when they first meet, and remember where it is for as long as they
# live. Two things go wrong with that:
#
# - A launcher that joins later, in place of a machine that was lost, waits until somebody writes the address into the
# store of its round, and those who know it do not write it again. Or it is the first by name, hosts another one, and
# the others never ask there. Either way the ranks wait for each other in vain. - What ranks wrote before they were
# started again is still there. Scripts that call torch's own init_process_group find the addresses of ranks that are
# gone: "Connection refused".
#
# So here the first machine of each round hosts a new store, and says so in that round. Ranks of one round also share
# one number of restarts, which torch's launchers count each for itself.

_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's own variable: no store of a launcher is used by ranks, and so none is remembered."""

_PORT = "lockstep/port"
_RESTARTS = "lockstep/restarts"


class RendezvousPerRestart(RendezvousHandler):
    """Stands before a handler of torch's.

    Args:
        inner: What brings the machines together.
        is_ending: Tells whether the ranks have been asked to end, so that no machine can join any more.
    """

    def __init__(self, inner: RendezvousHandler, is_ending: Callable[[], bool]) -> None:
        self._inner, self._is_ending = inner, is_ending
        self._round: RendezvousInfo | None = None
        self._hosted: object = None

    def get_backend(self) -> str:
        """Return the name of the kind of rendezvous."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in a launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines in the next round, and agree on a new store for the ranks. Blocks until they came."""
        with _without_sharing():
            found = self._inner.next_rendezvous()
        assert found.bootstrap_store_info is not None
        host = found.bootstrap_store_info.master_addr
        self._hosted = None  # that of the round before: its ranks have ended
        if found.rank == 0:
            self._hosted, port = start_store_server(host, _STORE_TIMEOUT_S)
            found.store.set(_PORT, str(port))
        else:
            port = int(found.store.get(_PORT))
        self._round = RendezvousInfo(found.store, found.rank, found.world_size, RendezvousStoreInfo(host, port))
        return self._round

    def agree_on_restarts(self, number: int) -> int:
        """Return the largest ``number`` that a machine of this round knows. Blocks until all have told theirs."""
        assert self._round is not None
        store = self._round.store
        store.set(f"{_RESTARTS}/{self._round.rank}", str(number))
        return max(int(store.get(f"{_RESTARTS}/{rank}")) for rank in range(self._round.world_size))

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to join; this one counts if the others have gone on without it."""
        if self._is_ending():
            return 0
        return self._inner.num_nodes_waiting() or int(self._is_forgotten())

    def _is_forgotten(self) -> bool:
        """Tell whether the others took this machine for dead, as its signs of life came late, and began a new round."""
        with contextlib.suppress(AttributeError):  # torch's own affairs, which may look different in another version
            state = cast(Any, self._inner)._state_holder.state
            return state.complete and cast(Any, self._inner)._this_node not in state.participants
        return False

    def is_closed(self) -> bool:
        """Tell whether the job is over."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Say that the job is over."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave for good, and end the job, unless it is only this machine that was told to end."""
        return self._is_ending() or self._inner.shutdown()


def rendezvous_per_restart(handler: RendezvousHandler, is_ending: Callable[[], bool]) -> RendezvousHandler:
    """Return ``handler`` behind `RendezvousPerRestart`, if machines may come and go and the user does not object."""
    if isinstance(handler, DynamicRendezvousHandler) and os.environ.get(_NO_SHARING, "0") != "1":
        return RendezvousPerRestart(handler, is_ending)
    return handler


@contextmanager
def _without_sharing() -> Iterator[None]:
    before = os.environ.get(_NO_SHARING)
    os.environ[_NO_SHARING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_SHARING]
        else:
            os.environ[_NO_SHARING] = before


# Where the launchers of a job's machines meet, and whether they can.

DEFAULT_PORT = 29500
"""torchrun's default; only of interest to several machines, as a single one takes a free port."""

_TIMEOUT_S = 900.0
"""torchrun's default for how long a machine waits for the others."""

_RETRY_S = 0.3


def choose_rendezvous(args: argparse.Namespace) -> None:
    """Fill in where the launchers meet: as torchrun does, at a free port when there is only this machine.

    Raises:
        ConfigurationError: The number of machines cannot be read, or the port is taken.
    """
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
    if args.standalone or (is_static and args.master_port is None and max_nodes(args) == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = LOCAL_BACKEND, "localhost:0", str(uuid.uuid4())
        # Not the host's name, which may resolve to nothing or to an address that is filtered.
        args.local_addr = args.local_addr or "127.0.0.1"
    if args.master_port is None:
        args.master_port = DEFAULT_PORT
    host, port = _endpoint(args)
    if args.rdzv_backend == "static" and args.node_rank == 0:
        _check_port(port)
    elif args.rdzv_backend == "c10d" and port and "is_host" not in args.rdzv_conf and _is_overlooked_host(host, port):
        args.rdzv_conf = ",".join(part for part in (args.rdzv_conf, "is_host=1") if part)


def prepare_for_others(args: argparse.Namespace) -> list[str]:
    """Set which interfaces the ranks use, in ``args`` and the environment; returns what to tell the user."""
    host, port = _endpoint(args)
    if max_nodes(args) == 1:
        # Otherwise Gloo would listen where the host's name leads to, which may be open to others.
        if (loopback := gloo_interface(host, one_machine=True)) is not None:
            os.environ.setdefault(GLOO_INTERFACE, loopback)
        return []
    notes = []
    # By default the ranks of the others are told this host's name.
    args.local_addr = args.local_addr or reachable_address(host)
    interface = gloo_interface(host, one_machine=False)
    if interface is not None and GLOO_INTERFACE not in os.environ:
        os.environ[GLOO_INTERFACE] = interface
        notes.append(f"{GLOO_INTERFACE}={interface}, as no other machine can reach {socket.gethostname()} by its name")
    return [*notes, f"waiting for the other machines of --nnodes {args.nnodes} at {host}:{port}"]


def await_host(args: argparse.Namespace) -> None:
    """Wait until the machine that hosts the meeting answers.

    Blocks at most as long as the rendezvous may take. Asked here since torch's own client logs every attempt with the
    stack of its C++ code, and holds back Ctrl-C.

    Raises:
        LockstepError: It did not answer in time.
    """
    host, port = _endpoint(args)
    if max_nodes(args) == 1 or args.rdzv_backend not in ("static", "c10d") or is_local(host):
        return
    timeout_s = _timeout_s(args)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LockstepError(
                    f"{socket.gethostname()} could not reach the first machine at {host}:{port} "
                    f"within {timeout_s:g} s: {error.strerror or error}.\n"
                    "Check that the command runs there (with --node-rank 0), that the address and the port are the "
                    "same on every machine, and that no firewall lies between."
                ) from None
        time.sleep(_RETRY_S)


def _is_overlooked_host(host: str, port: int) -> bool:
    """Say whether this machine should host the meeting, but torch would not see that.

    torch compares with what this host's name leads to, which need not be all of its addresses.
    """
    return is_local(host) and not _matches_machine_hostname(host) and _why_not_bindable(port) is None


def max_nodes(args: argparse.Namespace) -> int:
    """Return the largest number of machines.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return int(parse_min_max_nnodes(args.nnodes)[1])
    except (ValueError, RuntimeError):
        raise ConfigurationError(
            f"--nnodes {args.nnodes} is no number of machines.\nPass one such as 2, or a range such as 1:4."
        ) from None


def _endpoint(args: argparse.Namespace) -> tuple[str, int]:
    host, _, port = args.rdzv_endpoint.rpartition(":") if ":" in args.rdzv_endpoint else (args.rdzv_endpoint, "", "")
    try:
        return (host or args.master_addr).strip("[]"), int(port or args.master_port)
    except ValueError:
        raise ConfigurationError(f"--rdzv-endpoint {args.rdzv_endpoint} is no address.\nPass <host>:<port>.") from None


def _timeout_s(args: argparse.Namespace) -> float:
    for part in args.rdzv_conf.split(","):
        name, _, value = part.partition("=")
        if name.strip() in ("timeout", "join_timeout") and value.strip().isdigit():
            return float(value)
    return _TIMEOUT_S


def _check_port(port: int) -> None:
    reason = _why_not_bindable(port)
    if reason is not None:
        raise ConfigurationError(
            f"Port {port} on this machine {reason}.\n"
            "Choose another with --master-port, the same on every machine; on one machine leave it out for a free one."
        )


def _why_not_bindable(port: int) -> str | None:
    reasons = {errno.EADDRINUSE: "is already in use", errno.EACCES: "may only be used by root"}
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        # Other errors come from binding all addresses, which only we try; elastic says what it could not do.
        return reasons.get(error.errno or 0)
    return None
