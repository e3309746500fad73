"""Key-value stores hosted in this process, at no more addresses than those who meet there need."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

LOOPBACK = "127.0.0.1"

_BACKLOG = 1024


def host_store(address: str, timeout_s: float) -> tuple[Store, int]:
    """Start a store in this process for those that are told ``address``; return it and its port.

    torch's own would listen at every address of the machine. This one does so only if ``address`` is a name, which
    others may understand differently, or is not one of this machine's. It ends when the last reference to it goes.

    Args:
        address: By which others reach this machine.
        timeout_s: How long its operations may wait, here.
    """
    listener, here = _listener(address)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        here,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def part_of(store: Store, prefix: str) -> Store:
    """Return a view of ``store`` with keys of its own."""
    return PrefixStore(prefix, store)


def listen(host: str, port: int) -> socket.socket:
    """Listen at ``host``, or at all addresses of this machine if it is empty. Raises ``OSError`` if that fails."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _listener(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and by which name this process reaches it."""
    with suppress(ValueError, OSError):
        ipaddress.ip_address(address.partition("%")[0])
        return listen(address, 0), address
    return listen("", 0), "localhost"
