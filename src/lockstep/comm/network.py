"""The network: Gloo's interface, the limit of open sockets, keepalive probes for dead links, and bytes sent."""

import json
import math
import os
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch.futures import Future

from lockstep.base.env import is_loopback
from lockstep.errors import ConfigurationError

# The variable that Gloo reads. A value set by the user is never changed.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# The variable that says how many seconds a link may be down; 0 leaves connections unchanged.
LINK_TIMEOUT = "LOCKSTEP_LINK_TIMEOUT_S"

_LINK_TIMEOUT_S = 60.0
_MAX_PROBE_S = 5
_TCP_RTO_MAX_MS = 44  # of linux/tcp.h since 6.15; the socket module does not name it
_RETRANSMIT_S = 1.0

# For files that are not known in advance: logs, data files, libraries.
_SPARE_FILES = 64


def gloo_interface(master_addr: str | None, *, one_machine: bool) -> str | None:
    """Return the interface that Gloo should use, or ``None`` if its own choice will do.

    By default Gloo uses the address that this host's name resolves to. On one machine the loopback interface always
    works, while the name may not resolve. Between machines loopback does not work, and many systems map the host's
    name to 127.0.1.1, which no other machine can reach. Then this returns the interface with the route to rank zero.
    """
    if one_machine or master_addr is None:
        return "lo"
    address = reachable_address(master_addr)
    nics = psutil.net_if_addrs().items() if address else ()
    return next((name for name, entries in nics if any(_plain(entry.address) == address for entry in entries)), None)


def reachable_address(master_addr: str) -> str | None:
    """Return the address at which others reach this machine, or ``None`` if its name resolves to one already."""
    host_address = _own_address(socket.gethostname())
    if host_address is not None and not is_loopback(host_address):
        return None
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(master_addr.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: the system only looks up the route
            return str(probe.getsockname()[0])
    return None


def _plain(address: str) -> str:
    return address.partition("%")[0]  # without the interface of a link-local address


def _own_address(host: str) -> str | None:
    """Return the first address of ``host`` that is one of this machine, by trying to bind it; None if there is none."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def is_local(host: str) -> bool:
    """Return whether ``host`` is an address of this machine."""
    return _own_address(host) is not None


def allow_open_files(num_files: int, purpose: str) -> None:
    """Make sure that this process may open ``num_files`` more files or sockets; raise its soft limit if necessary.

    Args:
        num_files: The number of files needed.
        purpose: What they are for; the subject of the error message.

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
    """Make the kernel detect dead links to other machines, for all connections of this process.

    A power failure or a cut cable closes no connection. A process that only receives would not notice: Gloo and torch's
    store do not enable keepalive probes. A link may be down for less than `LINK_TIMEOUT`: TCP sends the lost data
    again. If it stays down longer, the connection fails soon after, and so does everything that waits for it.
    """
    limit_s = float(os.environ.get(LINK_TIMEOUT, _LINK_TIMEOUT_S))
    if limit_s <= 0:
        return
    for connection, peer_address, local_address in _open_connections():
        if peer_address != local_address and not is_loopback(peer_address):
            with suppress(OSError):
                _keep_alive(connection, limit_s)


def open_sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets."""
    # Gloo and NCCL do not expose their descriptors, so all descriptors of the process are searched.
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                # A duplicate: closing it does not close the connection, and socket options apply to the connection.
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                        yield connection


def _open_connections() -> Iterator[tuple[socket.socket, str, str]]:
    """Yield this process's TCP connections, with the addresses of the other end and of this one."""
    for connection in open_sockets():
        with suppress(OSError):  # not connected
            yield connection, connection.getpeername()[0], connection.getsockname()[0]


def _keep_alive(connection: socket.socket, limit_s: float) -> None:
    interval_s = max(1, min(_MAX_PROBE_S, int(limit_s / 4)))
    # The kernel counts from the last data received, which may be an answer from before the outage, and may end the
    # connection before it sends the next probe. So the limit leaves room for two probes after the link is up again.
    retransmit_s = max(_RETRANSMIT_S, limit_s / 10)
    give_up_s = limit_s + max(2 * interval_s, retransmit_s) + 1
    try:
        # If the outage also removes the route, the kernel retries 15 times, whatever the limit: these retries have to
        # last as long as the limit.
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, int(1000 * retransmit_s))
    except OSError:
        # Lost data is sent again after 0.2, 0.4, 0.8 ... s: when the link is back, the next retry may be as far away as
        # the outage was long.
        give_up_s = max(give_up_s, 2 * limit_s + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    # For data that is not acknowledged, which the kernel would resend for a quarter of an hour; and for the probes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_s * 1000))


_GLOO_NOISE = re.compile(r"^\[\S+:\d+\] |\.? This is typically caused by .*")


def gloo_cause(error: Exception) -> str:
    """Return the cause and the peer's address from an error of Gloo, without the location in Gloo's source."""
    return _GLOO_NOISE.sub("", (str(error).splitlines() or [""])[0])


# --- the connections of Gloo's groups ---------------------------------------------------------------------------------

# Host and port at which Gloo listens for a group, on each of its ranks. Every connection of the group leads to one of
# them, and no other connection does, whichever thread of this process opens it, and when.
_links: set[tuple[str, int]] = set()
# Whether they may be cut, and when that was done to those of the present groups, on whatever backend.
may_cut, cut_at_s = False, math.inf
# How often a call looks for that, and how long it may take to fail then.
_LOOK_S, _FAILS_S = 1.0, 3.0
_LISTENS = socket.SOL_SOCKET, socket.SO_ACCEPTCONN


def listening() -> set[tuple[str, int]]:
    """Return where this process listens; not at all addresses of the machine, which Gloo never does."""
    addresses = {_end(connection.getsockname()) for connection in open_sockets() if connection.getsockopt(*_LISTENS)}
    return {address for address in addresses if address[0] not in ("0.0.0.0", "::")}


def note_links(before: set[tuple[str, int]], store: Any, rank: int, size: int) -> None:
    """Note the connections of a new group, for `cut_links`. Collective: every rank of the group.

    Args:
        before: What `listening` returned before the group was made.
        store: Without keys of another group.
        rank: This rank in the group.
        size: The number of its ranks.
    """
    store.set(str(rank), json.dumps([*(listening() - before)]))
    for addresses in store.multi_get([*map(str, range(size))]):
        _links.update(map(_end, json.loads(addresses)))


def _end(address: Sequence[Any]) -> tuple[str, int]:
    return _plain(address[0]), address[1]


def cut_links() -> None:
    """Shut down the connections of all groups so far: calls on them fail at once, here and on the ranks they lead to.

    Gloo cannot abort: a call waits for a rank that is alive and has left the call, until its timeout.
    """
    global cut_at_s
    links, cut_at_s = set(_links), min(cut_at_s, time.monotonic())
    for connection in open_sockets():
        with suppress(OSError):  # the other end is gone; or it listens, and to shut that down would abort the process
            if links & {_end(connection.getpeername()), _end(connection.getsockname())}:
                connection.shutdown(socket.SHUT_RDWR)
    _links.difference_update(links)


def is_stuck() -> bool:
    """Return whether a call on the present groups that is not over will never be.

    Gloo does not notice the end of a connection if the first write of a call finds it.
    """
    return time.monotonic() - cut_at_s > _FAILS_S


def wait_for_call(handle: Any) -> Any:
    """Wait for a work or a future as its ``wait()`` does, but not for one that is stuck; see `is_stuck`.

    Raises:
        RuntimeError: It failed, or is stuck. Its group must not be destroyed then: Gloo would wait for it.
    """
    if may_cut and type(handle) in (dist.Work, Future):  # not our own work, which fails when its group is interrupted
        future, is_over = handle.get_future() if isinstance(handle, dist.Work) else handle, threading.Event()
        # On a device it is done as soon as the work is launched. A callback would use a stream, or break a CUDA graph.
        if not future.done():
            future.add_done_callback(lambda _: is_over.set())
            while not is_over.wait(_LOOK_S):
                if is_stuck():
                    raise RuntimeError("a rank was lost")
    return handle.wait()


# --- what was sent ----------------------------------------------------------------------------------------------------

# Of linux/tcp.h, struct tcp_info: tcpi_bytes_acked, and tcpi_busy_time in microseconds.
_ACKED, _BUSY, _INFO_BYTES = 120, 168, 176


class Sent(NamedTuple):
    """What this process has sent to one address.

    Attributes:
        num_bytes: Bytes that were acknowledged.
        busy_s: Seconds with data to send, summed over connections, which may send at the same time.
    """

    num_bytes: int
    busy_s: float


def sent_to(*, loopback: bool = False) -> dict[str, Sent]:
    """Return, by address, what this process's open TCP connections have sent; empty if the kernel does not count it.

    Args:
        loopback: Whether connections within this machine count, too.
    """
    sent: dict[str, Sent] = {}
    for connection, peer, local in _open_connections():
        if loopback or (peer != local and not is_loopback(peer)):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
            if len(info) >= _INFO_BYTES:
                (acked,), (busy_us,) = struct.unpack_from("=Q", info, _ACKED), struct.unpack_from("=Q", info, _BUSY)
                before = sent.get(peer, Sent(0, 0.0))
                sent[peer] = Sent(before.num_bytes + acked, before.busy_s + busy_us / 1e6)
    return sent
