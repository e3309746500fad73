"""The network: the interface that Gloo should use, and keepalive probes that notice a dead link."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

# Which network interface Gloo should use.

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that tells Gloo; what the user put there is never changed."""


def gloo_interface(master_addr: str | None, *, one_machine: bool) -> str | None:
    """Return the interface that Gloo should be told to use, or ``None`` if its own choice will do.

    Gloo takes the address that this host's name leads to. On one machine the loopback interface is always right, and
    the name may lead nowhere. Between machines it is the other way round: many systems map the host's name to
    127.0.1.1, which no other machine can reach; then it is the interface that leads to rank zero.
    """
    if one_machine or master_addr is None:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    ours = reachable_address(master_addr)
    for name, addresses in psutil.net_if_addrs().items() if ours else ():
        if any(found.address.partition("%")[0] == ours for found in addresses):
            return str(name)
    return None


@contextmanager
def gloo_interface_set(interface: str | None) -> Iterator[None]:
    """Tell Gloo to use ``interface`` while inside, unless the user has told it already."""
    if interface is None or GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(GLOO_INTERFACE, None)


def _name_leads_outside(name: str) -> bool:
    """Say whether the first address of ``name`` that belongs to this machine is one that others can reach."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return False


def reachable_address(master_addr: str) -> str | None:
    """Return this machine's address for the others, or ``None`` if its name leads to one already."""
    return None if _name_leads_outside(socket.gethostname()) else _address_towards(master_addr)


def _address_towards(host: str) -> str | None:
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # Sends nothing; the system only looks up the route.
            return str(probe.getsockname()[0])
    return None


def is_local(host: str) -> bool:
    """Say whether ``host`` is an address of this machine: only such an address can be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


# Connections to other machines that died without a word: found within a stated time, instead of never.
#
# A machine that loses power, or a cable that is cut, closes no connection. Who only waits to receive would not learn of
# it: Gloo and torch's store ask for nothing by which the kernel could tell. So the kernel is told here to probe.

LINK_TIMEOUT = "LOCKSTEP_LINK_TIMEOUT_S"
"""The variable with how many seconds a link may be down; 0 leaves connections as they are."""

_LIMIT_S = 60.0
_PROBE_S = 5


def link_timeout_s() -> float:
    """Return for how long a link may be down before a connection over it counts as dead."""
    try:
        return float(os.environ.get(LINK_TIMEOUT, _LIMIT_S))
    except ValueError:
        return _LIMIT_S


def set_keepalive() -> int:
    """Have the kernel probe all TCP connections of this process to other machines; return how many there are.

    A link that is down for less than `link_timeout_s` is survived: what was sent is sent again. After that the
    connection
    fails, and with it whatever waits for it. Linux only; elsewhere it does nothing.
    """
    limit = link_timeout_s()
    if sys.platform != "linux" or limit <= 0:
        return 0
    every = max(1, min(_PROBE_S, int(limit / 4)))
    num_found = 0
    for connection in _to_other_machines():
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(limit / every)))
            # For what was sent and not acknowledged, where the kernel would try for a quarter of an hour.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
            num_found += 1
    return num_found


def _to_other_machines() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    peer, ours = found.getpeername()[0], found.getsockname()[0]
                    if not _is_this_machine(peer, ours):
                        yield found


def _is_this_machine(peer: str, ours: str) -> bool:
    return peer == ours or ipaddress.ip_address(peer.partition("%")[0]).is_loopback
