"""Where the launchers of a job's machines meet, and whether they can."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import time
import uuid

from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.run import parse_min_max_nnodes

from lockstep.comm.interfaces import GLOO_INTERFACE, gloo_interface, is_local, reachable_address
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.launcher.local_rendezvous import BACKEND

DEFAULT_PORT = 29500
"""torchrun's default; only of interest to several machines, as a single one takes a free port."""

_TIMEOUT_S = 900.0
"""torchrun's default for how long a machine waits for the others."""

_RETRY_S = 0.3


def choose_meeting_place(args: argparse.Namespace) -> None:
    """Fill in where the launchers meet: as torchrun does, at a free port when there is only this machine.

    Raises:
        ConfigurationError: The number of machines cannot be read, or the port is taken.
    """
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
    if args.standalone or (is_static and args.master_port is None and max_nodes(args) == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = BACKEND, "localhost:0", str(uuid.uuid4())
        # Not the host's name, which may resolve to nothing or to an address that is filtered.
        args.local_addr = args.local_addr or "127.0.0.1"
    if args.master_port is None:
        args.master_port = DEFAULT_PORT
    host, port = _place(args)
    if args.rdzv_backend == "static" and args.node_rank == 0:
        _check_port(port)
    elif args.rdzv_backend == "c10d" and port and "is_host" not in args.rdzv_conf and _is_overlooked_host(host, port):
        args.rdzv_conf = ",".join(part for part in (args.rdzv_conf, "is_host=1") if part)


def prepare_for_others(args: argparse.Namespace) -> list[str]:
    """Set which interfaces the ranks use, in ``args`` and the environment; returns what to tell the user."""
    host, port = _place(args)
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
    host, port = _place(args)
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


def _place(args: argparse.Namespace) -> tuple[str, int]:
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
