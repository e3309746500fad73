"""Connections to other machines that died without a word: found within a stated time, instead of never.

A machine that loses power, or a cable that is cut, closes no connection. Who only waits to receive would not learn of
it: Gloo and torch's store ask for nothing by which the kernel could tell. So the kernel is told here to probe.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

LIMIT = "LOCKSTEP_LINK_TIMEOUT_S"
"""The variable with how many seconds a link may be down; 0 leaves connections as they are."""

_LIMIT_S = 60.0
_PROBE_S = 5


def limit_s() -> float:
    """Return for how long a link may be down before a connection over it counts as dead."""
    try:
        return float(os.environ.get(LIMIT, _LIMIT_S))
    except ValueError:
        return _LIMIT_S


def probe_connections() -> int:
    """Have the kernel probe all TCP connections of this process to other machines; return how many there are.

    A link that is down for less than `limit_s` is survived: what was sent is sent again. After that the connection
    fails, and with it whatever waits for it. Linux only; elsewhere it does nothing.
    """
    limit = limit_s()
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
                    if not _is_here(peer, ours):
                        yield found


def _is_here(peer: str, ours: str) -> bool:
    return peer == ours or ipaddress.ip_address(peer.partition("%")[0]).is_loopback
