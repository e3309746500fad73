"""The key-value store in which ranks and machines find each other: who hosts it, and notes that are left in it.

[Note: a store for one user]
Whoever can connect to c10d's TCPStore can read and overwrite every key. On the loopback interface that is every user
of the machine. So where one machine is enough, the store is served by `StoreServer`, which speaks the protocol of
c10d's clients and closes connections of other users; who is at the other end of a connection within a machine, the
kernel says in ``/proc/net/tcp``. Across machines the store is c10d's own: there only the network can keep others away
(docs/machines.md).
"""

from __future__ import annotations

import ipaddress
import json
import os
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.env import is_loopback

if TYPE_CHECKING:
    from lockstep.comm.world import World

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024


# --- The server


def start_store_server(address: str, timeout_s: float) -> tuple[Store, int]:
    """Start a store in this process for those that are given ``address``; return it and its port.

    torch's own would listen at every address of the machine. This one does so only if ``address`` is a name, which
    others may understand differently, or is not one of this machine's. On the loopback interface it serves this user
    only. It ends when the last reference to it goes.

    Args:
        address: By which others reach this machine.
        timeout_s: How long its operations may wait, here.
    """
    listener, here = _listener(address)
    port: int = listener.getsockname()[1]
    return serve_store(listener, here, timeout_s, one_user=is_loopback(here)), port


def serve_store(
    listener: socket.socket, here: str, timeout_s: float, *, one_user: bool, world_size: int | None = None
) -> Store:
    """Serve a store at ``listener`` from now on; return a connection to it, by the name ``here``.

    Args:
        listener: Is handed over.
        here: By which this process reaches it.
        timeout_s: How long operations may wait, here.
        one_user: Whether all who use it run on this machine as this user: then nobody else can.
        world_size: As c10d's store has it.
    """
    limit, port = timedelta(seconds=timeout_s), listener.getsockname()[1]
    if one_user and sys.platform == "linux":
        server = StoreServer(listener)
        with suppress(dist.DistError):  # a later c10d may speak another protocol
            store = TCPStore(here, port, world_size, False, timeout=limit, wait_for_workers=False)
            if store.add("lockstep/hosted", 1) == 1 and store.get("lockstep/hosted") == b"1":
                weakref.finalize(store, server.close)
                return store
        server.close()
        server.thread.join()
        listener = listen(here, port)
    return TCPStore(
        here,
        port,
        world_size,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        # Bound before and handed over, so that errors are Python's own, and a local job is not open to the network.
        master_listen_fd=listener.detach(),
    )


def prefixed_store(store: Store, prefix: str) -> Store:
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


_Read = Generator[int, bytes, Any]
"""Reads a request: gives how many bytes it needs next, and gets them."""

(
    _VALIDATE,
    _SET,
    _COMPARE_SET,
    _GET,
    _ADD,
    _CHECK,
    _WAIT,
    _NUM_KEYS,
    _DELETE,
    _APPEND,
    _MULTI_GET,
    _MULTI_SET,
    _CANCEL_WAIT,
    _PING,
) = range(14)
"""The first byte of a request. Source: ``QueryType`` in c10d's TCPStoreBackend.hpp. Queues are not served."""

_REPLY_S = 5.0
"""How long a client may take to make room for a reply before it is dropped: it asks nothing more until it has it."""


def _number() -> _Read:
    return int.from_bytes((yield 8), "little", signed=True)


def _text() -> _Read:
    return (yield (yield from _number()))


def _texts() -> _Read:
    found = []
    for _ in range((yield from _number())):
        found.append((yield from _text()))
    return found


def _packed(value: int | bytes) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(8, "little", signed=True)
    return len(value).to_bytes(8, "little") + value


class _Client:
    """A connection to the server, with the request that is half read."""

    def __init__(self, connection: socket.socket, serve: Callable[[_Client], _Read]) -> None:
        self.connection = connection
        self.awaited: set[bytes] = set()
        self._received = bytearray()
        self._requests = serve(self)
        self._num_needed: int = next(self._requests)

    def receive(self) -> None:
        """Take what has arrived. Raises ``OSError`` or ``ValueError`` if the connection is of no more use."""
        data = self.connection.recv(2**16)
        if not data:
            raise ConnectionError
        self._received += data
        while len(self._received) >= self._num_needed:
            piece = bytes(self._received[: self._num_needed])
            del self._received[: self._num_needed]
            self._num_needed = self._requests.send(piece)

    def reply(self, *values: bytes) -> None:
        """Send a reply."""
        self.connection.sendall(b"".join(values))


class StoreServer:
    """Serves a store to c10d's clients of this user, in a thread of its own; see [Note: a store for one user].

    Args:
        listener: Where it listens; closed at the end.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)  # a client may be gone again when it is accepted
        self._listener = listener
        self._values: dict[bytes, bytes] = {}
        self._waiting: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="lockstep-store", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End; clients find their connections closed."""
        self._waker.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    for each in list(self._selector.get_map().values()):
                        each.fileobj.close()  # type: ignore[union-attr]
                    self._selector.close()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                client: _Client = key.data
                try:
                    client.receive()
                except (OSError, ValueError):
                    self._drop(client)

    def _accept(self) -> None:
        with suppress(OSError):  # gone again
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_REPLY_S)
            if peer_uid(connection) not in (os.geteuid(), 0):
                connection.close()
                return
            self._selector.register(connection, selectors.EVENT_READ, _Client(connection, self._serve))

    def _drop(self, client: _Client) -> None:
        self._waiting.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for client in list(self._waiting):
            client.awaited.discard(key)
            if not client.awaited:
                self._waiting.discard(client)
                with suppress(OSError):  # found out when it is read from
                    client.reply(b"\0")

    def _serve(self, client: _Client) -> _Read:
        """Answer the requests of a client, one after the other."""
        values, reply = self._values, client.reply
        while True:
            query = (yield 1)[0]
            if query == _VALIDATE:
                yield 4
            elif query == _PING:
                reply((yield 4))
            elif query == _SET:
                self._put((yield from _text()), (yield from _text()))
            elif query == _MULTI_SET:
                for _ in range((yield from _number())):
                    self._put((yield from _text()), (yield from _text()))
            elif query == _COMPARE_SET:
                key, expected, desired = (yield from _text()), (yield from _text()), (yield from _text())
                found: bytes = values.get(key, b"")
                if found == expected:
                    self._put(key, desired)
                    found = desired
                reply(_packed(found if key in values else expected))
            elif query == _APPEND:
                key, value = (yield from _text()), (yield from _text())
                self._put(key, values.get(key, b"") + value)
            elif query == _ADD:
                key, amount = (yield from _text()), (yield from _number())
                total = int(values.get(key, b"0")) + amount
                self._put(key, b"%d" % total)
                reply(_packed(total))
            elif query == _GET:
                reply(_packed(values.get((yield from _text()), b"")))
            elif query == _MULTI_GET:
                reply(*[_packed(values.get(key, b"")) for key in (yield from _texts())])
            elif query == _CHECK:
                reply(b"\0" if values.keys() >= set((yield from _texts())) else b"\1")
            elif query == _WAIT:
                client.awaited = set((yield from _texts())) - values.keys()
                if client.awaited:
                    self._waiting.add(client)
                else:
                    reply(b"\0")
            elif query == _CANCEL_WAIT:
                self._waiting.discard(client)
                reply(b"\1")
            elif query == _DELETE:
                reply(_packed(int(values.pop((yield from _text()), None) is not None)))
            elif query == _NUM_KEYS:
                reply(_packed(len(values)))
            else:
                raise ValueError(f"c10d's query {query} is not served")


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection within this machine; ``None`` if nobody of it is there."""
    peer, own = (_address(*name[:2]) for name in (connection.getpeername(), connection.getsockname()))
    for _, local, remote, state, *_, uid in _connections():
        # Only of an established connection: one that its owner has closed is listed as root's.
        if state == "01" and (_decoded(local), _decoded(remote)) == (peer, own):
            return int(uid)
    return None


def _connections() -> Iterator[list[str]]:
    """Give the first eight columns of the kernel's lists of connections; see proc(5)."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            yield from (line.split()[:8] for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:])


def _address(host: str, port: int) -> tuple[bytes, int]:
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).packed, port


def _decoded(text: str) -> tuple[bytes, int]:
    """Return what ``0100007F:1F90`` stands for: words in the machine's order of bytes, and a port."""
    host, _, port = text.partition(":")
    words = struct.pack(f">{len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return (words[12:] if words[:12] == b"\0" * 10 + b"\xff\xff" else words), int(port, 16)


# --- Notes of ranks and machines


STORE_TIMEOUT_S = 3.0
"""How long the store may take to answer; then a note is left out."""

_MAX_FAILURES = 3
"""After so many in a row the store is given up: whoever hosts it has ended."""


class StatusKeys:
    """A note of each rank, for rank zero to read: beside the collectives, and nobody waits.

    Each note lies under one key that is written over again and again. The store is reached over a connection of its
    own, as the engine's is locked while it waits for somebody. Made on every rank of a world, in the same order; used
    by one thread of each.

    Args:
        world: In which they are.
        num_ranks: How many take part: all, or only this one.
    """

    def __init__(self, world: World, num_ranks: int) -> None:
        self._rank = world.rank
        self._others = [rank for rank in range(num_ranks) if rank != world.rank] if num_ranks > 1 else []
        self._prefix = "lockstep/board"
        if self._others:  # the n-th of each rank is the same one
            number = PrefixStore(self._prefix, dist.distributed_c10d._get_default_store()).add(f"of/{world.rank}", 1)
            self._prefix = f"{self._prefix}/{number}"
        self._store: Store | None = None
        self._known: list[int] = []
        self._num_failures = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the store does not answer any more."""
        return self._num_failures >= _MAX_FAILURES

    def post(self, note: Any) -> None:
        """Replace this rank's note, which JSON can hold. Blocks some seconds at most."""
        self._with_store(lambda store: store.set(str(self._rank), json.dumps(note)))

    def read(self) -> dict[int, Any]:
        """Return the notes of the other ranks, as far as they have left one. Blocks some seconds at most."""
        notes: dict[int, Any] = {}

        def collect(store: Store) -> None:
            missing = set(self._others).difference(self._known)
            self._known += [rank for rank in sorted(missing) if store.check([str(rank)])]
            texts = store.multi_get([str(rank) for rank in self._known]) if self._known else []
            for rank, text in zip(self._known, texts, strict=True):
                with suppress(ValueError):  # one note that is no JSON takes no other with it
                    notes[rank] = json.loads(text)

        self._with_store(collect)
        return notes

    def _with_store(self, act: Callable[[Store], None]) -> None:
        if not self._others or self.is_given_up:
            return
        try:
            if self._store is None:
                clone: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
                clone.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
                self._store = PrefixStore(self._prefix, clone)
            act(self._store)
            self._num_failures = 0
        except (RuntimeError, OSError):  # c10d's errors are RuntimeErrors
            self._store, self._num_failures = None, self._num_failures + 1


_DEFAULT_PORT = 29400  # torch elastic's
_CONNECT_S = 5.0
_ANSWER_S = 2.0


class InterNodeStore:
    """Notes of the launchers of a job's machines by topic, one of each; a machine that is out of reach is left out.

    Args:
        endpoint: ``host:port`` of the store in which the machines have met.
        run_id: Of the job, as several may share a store.
    """

    def __init__(self, endpoint: str, run_id: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._place = host.strip("[]") or "localhost", int(port) if port.isdigit() else _DEFAULT_PORT
        self._prefix = f"lockstep/bulletin/{run_id}"
        self._store: Store | None = None
        self._numbers: dict[str, int] = {}

    def is_host(self) -> bool:
        """Return whether the store is in this process, and ends with it."""
        with suppress(psutil.Error):
            return any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == self._place[1]
                for each in psutil.Process().net_connections(kind="tcp")
            )
        return False

    def post(self, topic: str, note: Any) -> None:
        """Replace this machine's note on ``topic`` by ``note``, which JSON can hold. Blocks some seconds at most."""

        def write(store: Store) -> None:
            if topic not in self._numbers:
                self._numbers[topic] = store.add(f"{topic}/count", 1)
            store.set(f"{topic}/{self._numbers[topic]}", json.dumps(note))

        self._with_store(write)

    def others(self, topic: str) -> list[Any]:
        """Return the notes of the other machines on ``topic``. Blocks some seconds at most."""
        notes: list[Any] = []

        def read(store: Store) -> None:
            for number in range(1, store.add(f"{topic}/count", 0) + 1):
                key = f"{topic}/{number}"
                if number != self._numbers.get(topic) and store.check([key]):
                    with suppress(ValueError):
                        notes.append(json.loads(store.get(key)))

        self._with_store(read)
        return notes

    def _with_store(self, act: Callable[[Store], None]) -> None:
        """Let ``act`` use the store; if that cannot be reached, it is tried anew the next time."""
        try:
            # torch's client would write pages into the log if nobody listened.
            socket.create_connection(self._place, timeout=_ANSWER_S).close()
            if self._store is None:
                limit = timedelta(seconds=_CONNECT_S)
                opened = TCPStore(*self._place, None, False, timeout=limit, wait_for_workers=False)
                opened.set_timeout(timedelta(seconds=_ANSWER_S))
                self._store = PrefixStore(self._prefix, opened)
            act(self._store)
        except (OSError, RuntimeError):  # c10d's errors are RuntimeErrors
            self._store = None
