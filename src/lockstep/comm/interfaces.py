"""Which network interface Gloo should use."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

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
def told_gloo(interface: str | None) -> Iterator[None]:
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
