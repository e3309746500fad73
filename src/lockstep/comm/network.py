"""The network: Gloo's interface, how many sockets may be open, keepalive probes for dead links, and what was sent."""

import ipaddress
import os
import re
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil

from lockstep.errors import ConfigurationError

# The variable that Gloo reads; what the user put there is never changed.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# The variable with how many seconds a link may be down; 0 leaves connections as they are.
LINK_TIMEOUT = "LOCKSTEP_LINK_TIMEOUT_S"

_LINK_TIMEOUT_S = 60.0
_MAX_PROBE_S = 5
_TCP_RTO_MAX_MS = 44  # of linux/tcp.h since 6.15; the socket module does not name it
_RETRANSMIT_S = 1.0

# What a process opens beside what is known in advance: logs, data files, libraries.
_SPARE_FILES = 64


def gloo_interface(master_addr: str | None, *, one_machine: bool) -> str | None:
    """Return the interface that Gloo should use, or ``None`` if its own choice will do.

    Gloo takes the address that this host's name leads to. On one machine the loopback interface is always right, and
    the name may lead nowhere. Between machines it is the other way round: many systems map the host's name to
    127.0.1.1, which no other machine can reach; then it is the interface that leads to rank zero.
    """
    if one_machine or master_addr is None:
        return "lo"
    ours = reachable_address(master_addr)
    interfaces = psutil.net_if_addrs().items() if ours else ()
    return next((name for name, found in interfaces if any(_plain(each.address) == ours for each in found)), None)


def reachable_address(master_addr: str) -> str | None:
    """Return this machine's address for the others, or ``None`` if its name leads to one already."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # fails for an address that is not this machine's
                if not _is_loopback(str(address[0])):
                    return None
                break
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(master_addr.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: the system only looks up the route
            return str(probe.getsockname()[0])
    return None


def _plain(address: str) -> str:
    return address.partition("%")[0]  # without the interface of a link-local address


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(_plain(address)).is_loopback


def is_local(host: str) -> bool:
    """Return whether ``host`` is an address of this machine: only such an address can be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def allow_open_files(num_files: int, purpose: str) -> None:
    """Make sure that this process may open ``num_files`` more, sockets included; raise its soft limit if need be.

    Args:
        num_files: At least.
        purpose: What for, to begin a sentence with.

    Raises:
        ConfigurationError: The hard limit is lower.
    """
    needed = len(os.listdir("/proc/self/fd")) + num_files + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"{purpose} takes {needed} open files on {socket.gethostname()}, but a process may have {hard}.\n"
            "Raise that limit where the job is started: `ulimit -Hn`, LimitNOFILE of a systemd service, or "
            "docker run --ulimit nofile=65536."
        )
    roomy = 2 * needed  # more groups may be made later
    resource.setrlimit(resource.RLIMIT_NOFILE, (roomy if hard == resource.RLIM_INFINITY else min(hard, roomy), hard))


def set_keepalive() -> None:
    """Have the kernel notice when a link to another machine is dead, for all connections of this process.

    A machine that loses power, or a cable that is cut, closes no connection. Who only waits to receive would not learn
    of it: Gloo and torch's store ask for nothing by which the kernel would notice. A link that is down for less than
    `LINK_TIMEOUT` is survived: what was sent is sent again. One that stays down fails the connection soon after, and
    with it whatever waits for it.
    """
    limit_s = float(os.environ.get(LINK_TIMEOUT, _LINK_TIMEOUT_S))
    if limit_s <= 0:
        return
    for found, peer, ours in _open_connections():
        if peer != ours and not _is_loopback(peer):
            with suppress(OSError):
                _keep_alive(found, limit_s)


def _open_connections() -> Iterator[tuple[socket.socket, str, str]]:
    """Yield this process's TCP connections, with the addresses of the other end and of this one."""
    # Gloo and NCCL hand out no descriptors: those of the process are looked through instead.
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # A copy: closing it leaves the connection as it is, and options are those of the connection.
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found, found.getpeername()[0], found.getsockname()[0]


def _keep_alive(connection: socket.socket, limit_s: float) -> None:
    every = max(1, min(_MAX_PROBE_S, int(limit_s / 4)))
    # The kernel counts from the last sign of life, which may be a probe older than the outage, and ends a connection
    # before it sends the next probe. So the link has to be up again for two probes before the time is up.
    retransmit_s = max(_RETRANSMIT_S, limit_s / 10)
    give_up_s = limit_s + max(2 * every, retransmit_s) + 1
    try:
        # Where the outage has taken the route away, the kernel tries 15 times, whatever limit it was given: these have
        # to last as long.
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, int(1000 * retransmit_s))
    except OSError:
        # What was sent into an outage is sent again after 0.2, 0.4, 0.8 ... s: when the link has come back, the next
        # time may be as far away as the outage was long.
        give_up_s = max(give_up_s, 2 * limit_s + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    # For what was sent and not acknowledged, where the kernel would try for a quarter of an hour; and for the probes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_s * 1000))


_GLOO_NOISE = re.compile(r"^\[\S+:\d+\] |\.? This is typically caused by .*")


def gloo_cause(error: Exception) -> str:
    """Return the first line of an error of Gloo: what failed and the peer's address, not the place in its source."""
    return _GLOO_NOISE.sub("", (str(error).splitlines() or [""])[0])


# --- what was sent ----------------------------------------------------------------------------------------------------

# Of linux/tcp.h, struct tcp_info: tcpi_bytes_acked, and tcpi_busy_time in microseconds.
_ACKED, _BUSY, _INFO_BYTES = 120, 168, 176


class Sent(NamedTuple):
    """What this process has sent to one address.

    Attributes:
        num_bytes: That have arrived there.
        busy_s: Seconds in which there was something to send; summed over connections, which may send side by side.
    """

    num_bytes: int
    busy_s: float


def sent_to(*, loopback: bool = False) -> dict[str, Sent]:
    """Return by address what this process's open TCP connections have sent; empty where the kernel does not count.

    Args:
        loopback: Whether connections within this machine count, too.
    """
    found: dict[str, Sent] = {}
    for connection, peer, ours in _open_connections():
        if loopback or (peer != ours and not _is_loopback(peer)):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
            if len(info) >= _INFO_BYTES:
                (acked,), (busy_us,) = struct.unpack_from("=Q", info, _ACKED), struct.unpack_from("=Q", info, _BUSY)
                before = found.get(peer, Sent(0, 0.0))
                found[peer] = Sent(before.num_bytes + acked, before.busy_s + busy_us / 1e6)
    return found
