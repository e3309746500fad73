"""The key-value store through which ranks and machines find each other: its server, and the status notes in it."""

import ipaddress
import json
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed import HashStore as HashStore

from lockstep.base.env import is_loopback
from lockstep.base.torch_internals import default_store
from lockstep.comm.network import open_sockets

LOOPBACK = "127.0.0.1"
# All ranks of a machine may connect at the same moment. The kernel reduces this to its own limit.
_BACKLOG = 1024
# torch's own variable, which torch reads for env:// only. A torch that was built without libuv, as Debian's, needs 0.
USE_LIBUV = os.environ.get("USE_LIBUV", "1") == "1"


def start_store_server(address: str, timeout_s: float) -> tuple[Store, int]:
    """Start a store in this process for clients that know ``address``; return it and its port.

    torch's own store would listen at every address of the machine. This one does so only if ``address`` is a name,
    which others may resolve differently, or is not an address of this machine. On the loopback interface it serves this
    user only. It ends with the last reference to it.

    Args:
        address: The address at which others reach this machine.
        timeout_s: How long operations of this process may wait.
    """
    try:
        ipaddress.ip_address(address.partition("%")[0])
        listener, host = listen(address, 0), address
    except (ValueError, OSError):  # a name, or an address that is not this machine's, such as a forwarded one
        listener, host = listen("", 0), "localhost"
    port: int = listener.getsockname()[1]
    return serve_store(listener, host, timeout_s, one_user=is_loopback(address)), port


def serve_store(listener: socket.socket, host: str, timeout_s: float, *, one_user: bool) -> Store:
    """Serve a store at ``listener`` from now on; return a connection to it, at the address ``host``.

    Args:
        listener: The listening socket, which the store takes over.
        host: The address at which this process reaches it.
        timeout_s: How long operations of this process may wait.
        one_user: Whether all clients run on this machine as this user: then other users are refused.
    """
    # The port is read before the listener is handed over: afterwards it may be closed.
    port = listener.getsockname()[1]
    if one_user:
        server = StoreServer(listener)
        with suppress(DistError):  # a later c10d may speak another protocol
            store = open_store((host, port), timeout_s)
            if store.add("lockstep/hosted", 1) == 1 and store.get("lockstep/hosted") == b"1":
                weakref.finalize(store, server.close)
                return store
        server.close()
        server.thread.join()
        listener = listen(host, port)
    # A socket that is already bound: errors are then Python's own, and a local job is not open to the network.
    limit, descriptor = timedelta(seconds=timeout_s), listener.detach()
    options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": descriptor, "use_libuv": USE_LIBUV}
    return TCPStore(host, port, None, True, limit, **options)


def listen(host: str, port: int) -> socket.socket:
    """Listen at ``host``, or at all addresses of this machine if it is empty. Raises ``OSError`` if that fails."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


# --- The server: a thread for each client, one request at a time


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """Block until ``num_bytes`` were read. Raises ``EOFError`` if the client has gone."""
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def _read_number(file: BinaryIO) -> int:
    return int.from_bytes(_read(file, 8), "little", signed=True)


def _read_arguments(file: BinaryIO, kinds: Sequence[str]) -> Iterator[Any]:
    """Read what c10d's clients send after a command: numbers of 8 bytes, and texts after their length."""
    for kind in kinds:
        if kind == "word":
            yield _read(file, 4)
        elif kind == "number":
            yield _read_number(file)
        else:
            # Their number comes before several texts or pairs of texts.
            count = 1 if kind == "text" else _read_number(file) * (2 if kind == "pairs" else 1)
            for _ in range(count):
                yield _read(file, _read_number(file))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


_YES, _NO = b"\0", b"\1"
_GO_ON, _CANCELLED = b"\0", b"\1"  # the answers to a wait and to a cancelled wait


class StoreServer:
    """Serves a store to c10d's clients of this user.

    [Note: a store for one user]
    Anyone who can connect to c10d's TCPStore can read and overwrite every key. On the loopback interface that is every
    user of the machine. So for jobs on one machine this class serves the store. It speaks the protocol of c10d's
    clients and closes connections of other users; the kernel lists the user at the other end of a local connection in
    ``/proc/net/tcp``. Across machines the store is c10d's own: there only the network can keep others out
    (docs/machines.md).

    Args:
        listener: The listening socket; closed at the end.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.values: dict[bytes, bytes] = {}
        self._waiting: dict[socket.socket, set[bytes]] = {}  # by client, the keys that do not exist yet
        self._clients: set[socket.socket] = set()
        self._is_closed = False
        self._lock = threading.Lock()  # held while a request runs, not while it is read
        self.thread = threading.Thread(target=self._accept, name="lockstep-store", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the server and close the clients' connections."""
        self._is_closed = True
        # Without the lock: the garbage collector may call this in a thread that holds the lock.
        for endpoint in (self._listener, *list(self._clients)):
            with suppress(OSError):  # gone already
                endpoint.shutdown(socket.SHUT_RDWR)  # wakes threads that wait on it; close() would not

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                with suppress(OSError):  # a client that has already gone, or `close`
                    connection, _ = self._listener.accept()
                    threading.Thread(target=self._serve, args=(connection,), name="lockstep-store", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Answer a client's requests in order, until the client has gone."""
        with client, suppress(OSError, EOFError, ValueError, LookupError):  # gone, or speaks another protocol
            # Looked up while the connection is open, so the entry cannot belong to a later one. Root may do anything.
            if peer_uid(client) not in (os.geteuid(), 0):
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients.add(client)
            try:
                file = client.makefile("rb")
                while True:
                    command, *kinds = _COMMANDS[_read(file, 1)[0]]
                    arguments = list(_read_arguments(file, kinds))
                    with self._lock:
                        reply = command(self, client, *arguments)
                    client.sendall(reply)
            finally:
                self._clients.discard(client)
                with self._lock:
                    self._waiting.pop(client, None)

    def _put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        for client, missing in list(self._waiting.items()):
            missing.discard(key)
            if not missing:
                del self._waiting[client]
                with suppress(OSError):  # its own thread notices
                    client.sendall(_GO_ON)

    # The commands, which return their replies. The lock is held.

    def _set(self, client: socket.socket, *pairs: bytes) -> bytes:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._put(key, value)
        return b""

    def _compare_set(self, client: socket.socket, key: bytes, expected: bytes, desired: bytes) -> bytes:
        if self.values.get(key, b"") == expected:
            self._put(key, desired)
        return _text(self.values.get(key, expected))

    def _append(self, client: socket.socket, key: bytes, value: bytes) -> bytes:
        self._put(key, self.values.get(key, b"") + value)
        return b""

    def _add(self, client: socket.socket, key: bytes, amount: int) -> bytes:
        total = int(self.values.get(key, b"0")) + amount
        self._put(key, b"%d" % total)
        return _number(total)

    def _get(self, client: socket.socket, *keys: bytes) -> bytes:
        return b"".join(_text(self.values.get(key, b"")) for key in keys)

    def _wait(self, client: socket.socket, *keys: bytes) -> bytes:
        missing = set(keys) - self.values.keys()
        if not missing:
            return _GO_ON
        self._waiting[client] = missing
        return b""

    def _cancel_wait(self, client: socket.socket) -> bytes:
        # Answered even if the wait was answered in the meantime: the client then expects both answers.
        self._waiting.pop(client, None)
        return _CANCELLED


# Indexed by the first byte of a request: the function, and the arguments that follow that byte.
# Source: ``QueryType`` in c10d's TCPStoreBackend.hpp. Queue commands, which come after these, are not supported.
_COMMANDS: list[tuple[Any, ...]] = [
    (lambda server, client, magic: b"", "word"),  # validate
    (StoreServer._set, "text", "text"),
    (StoreServer._compare_set, "text", "text", "text"),
    (StoreServer._get, "text"),
    (StoreServer._add, "text", "number"),
    (lambda server, client, *keys: _YES if server.values.keys() >= set(keys) else _NO, "texts"),  # check
    (StoreServer._wait, "texts"),
    (lambda server, client: _number(len(server.values)),),  # the number of keys
    (lambda server, client, key: _number(int(server.values.pop(key, None) is not None)), "text"),  # delete
    (StoreServer._append, "text", "text"),
    (StoreServer._get, "texts"),
    (StoreServer._set, "pairs"),
    (StoreServer._cancel_wait,),
    (lambda server, client, nonce: nonce, "word"),  # ping
]


def _words(packed: bytes) -> str:
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


_MAPPED_IPV4 = _words(b"\0" * 10 + b"\xff\xff")


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection within this machine; ``None`` if the peer is not listed."""
    ends = [_name_in_proc(*name[:2]) for name in (connection.getpeername(), connection.getsockname())]
    for file in ("tcp", "tcp6"):
        with suppress(OSError):  # without IPv6 there is no tcp6
            # The columns are in proc(5).
            for line in Path(f"/proc/net/{file}").read_text(errors="replace").splitlines()[1:]:
                _, local, remote, state, _, _, _, uid, *_ = line.split()
                # Established connections only: a connection that its owner has closed is listed as root's.
                if state == "01" and [local.removeprefix(_MAPPED_IPV4), remote.removeprefix(_MAPPED_IPV4)] == ends:
                    return int(uid)
    return None


def _name_in_proc(host: str, port: int) -> str:
    """Return an address as ``/proc/net`` writes it: words in the machine's byte order, and the port."""
    address = ipaddress.ip_address(host.partition("%")[0])
    # An IPv6 socket that is connected over IPv4 shows the peer's address mapped into IPv6.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return f"{_words((mapped or address).packed)}:{port:04X}"


# --- Status notes of ranks and machines


def read_present(store: Store, keys: Sequence[str], known_keys: set[str]) -> dict[str, bytes]:
    """Return the values of the ``keys`` that exist, in their order. Takes two requests if all of them exist.

    Args:
        store: The store to read.
        keys: Each is checked until it has existed once; keys are never deleted.
        known_keys: The keys that existed before; keys that exist now are added.
    """
    new = [key for key in keys if key not in known_keys]
    if new:
        known_keys.update(_present(store, new))
    present = [key for key in keys if key in known_keys]
    return dict(zip(present, store.multi_get(present), strict=True)) if present else {}


def _present(store: Store, keys: Sequence[str]) -> list[str]:
    # Checked by halves: if few of a thousand are missing, that takes about twenty requests.
    if store.check(list(keys)):
        return list(keys)
    half = len(keys) // 2
    return [*_present(store, keys[:half]), *_present(store, keys[half:])] if half else []


# How long the store may take to answer; after that, a note is skipped.
_ANSWER_S = 3.0
# After this many failures in a row the ranks stop using the store: its host has ended.
_MAX_FAILURES = 3


class _Notes:
    """Notes under keys that are overwritten repeatedly, in a store that may be out of reach.

    Args:
        prefix: Of the keys.
        connect: Opens a connection; may raise c10d's errors.
        address: The store's address, if known. It is probed first: torch's client would write pages into the log.
    """

    def __init__(self, prefix: str, connect: Callable[[], Store], address: tuple[str, int] | None = None) -> None:
        self._prefix, self._connect, self._address = prefix, connect, address
        self._store: Store | None = None
        self.num_failures = 0
        self.known: set[str] = set()  # keys found before
        self.numbers: dict[str, int] = {}  # by topic, the number of this machine's note

    def read(self, keys_in: Callable[[Store], Sequence[str]]) -> dict[str, Any]:
        """Return the notes, JSON values, under the keys that exist; none if the store is out of reach."""
        notes: dict[str, Any] = {}

        def collect(store: Store) -> None:
            for key, text in read_present(store, keys_in(store), self.known).items():
                with suppress(ValueError):  # a note that is not JSON must not hide the others
                    notes[key] = json.loads(text)

        self.use(collect)
        return notes

    def use(self, act: Callable[[Store], None]) -> bool:
        """Let ``act`` use the store; return whether it could be reached. If not, the next call opens it again."""
        try:
            if self._address is not None:
                socket.create_connection(self._address, timeout=_ANSWER_S).close()
            if self._store is None:
                opened = self._connect()
                opened.set_timeout(timedelta(seconds=_ANSWER_S))
                self._store = PrefixStore(self._prefix, opened)
            act(self._store)
            self.num_failures = 0
        except (RuntimeError, OSError):  # c10d's errors are RuntimeErrors
            self._store, self.num_failures = None, self.num_failures + 1
        return self.num_failures == 0


class StatusKeys:
    """A note of each rank, which rank zero reads. It needs no collective, and no rank waits.

    Each note has one key, which is overwritten repeatedly. Created on every rank of a world, in the same order; used by
    one thread of each rank.

    Args:
        rank: This process, in the default group.
        num_ranks: How many take part: all, or only this one.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._others = [str(other) for other in range(num_ranks) if other != rank] if num_ranks > 1 else []
        # A rank alone also creates an object, so that callers need no branch, but it uses no store.
        if self._others:
            store = default_store()
            number = PrefixStore("lockstep/status", store).add(f"of/{rank}", 1)  # the n-th ones belong together
            # A separate connection: the engine's is locked while it waits.
            self._notes = _Notes(f"lockstep/status/{number}", store.clone)  # type: ignore[attr-defined]

    def post(self, note: Any) -> None:
        """Replace this rank's note, a JSON value. Blocks some seconds at most."""
        if self._is_used:
            self._notes.use(lambda store: store.set(str(self._rank), json.dumps(note)))

    def read(self) -> dict[int, Any]:
        """Return the notes of the other ranks that have posted one. Blocks some seconds at most."""
        notes = self._notes.read(lambda _: self._others) if self._is_used else {}
        return {int(rank): note for rank, note in notes.items()}

    @property
    def _is_used(self) -> bool:
        return bool(self._others) and self._notes.num_failures < _MAX_FAILURES


DEFAULT_STORE_PORT = 29400  # torch elastic's
# c10d's client asks DNS for the name of each address that it connects to: 10 s if no DNS server answers.
_CONNECT_S = 20.0


class InterNodeStore:
    """Notes of the launchers of a job's machines, by topic. Machines that are out of reach are skipped.

    Each call blocks some seconds at most.

    Args:
        endpoint: ``host:port`` of the store that the machines used for their rendezvous.
        run_id: Of the job: several jobs may share a store.
    """

    def __init__(self, endpoint: str, run_id: str) -> None:
        self._prefix = f"lockstep/launchers/{run_id}"
        host, _, port = endpoint.rpartition(":")
        self.move_to((host.strip("[]") or "localhost", int(port) if port.isdigit() else DEFAULT_STORE_PORT))

    def move_to(self, address: tuple[str, int]) -> None:
        """Use the store at ``address`` from now on; earlier notes are not copied."""
        self._address = address
        # Replaced as one object, because another thread may be using the old one.
        self._notes = _Notes(self._prefix, partial(open_store, address), address)

    def is_host(self) -> bool:
        """Return whether the store runs in this process and ends with it."""
        # Reads this process's sockets only: /proc/net/tcp lists those of the whole machine, a thousand on the host.
        listening = (sock for sock in open_sockets() if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return any(sock.getsockname()[1] == self._address[1] for sock in listening)

    def post(self, topic: str, note: Any) -> bool:
        """Replace this machine's note on ``topic`` by ``note``, a JSON value; return whether it was stored."""

        def write(store: Store) -> None:
            # Machines have no numbers that survive a restart, so each takes the next number at its first note.
            if topic not in notes.numbers:
                notes.numbers[topic] = store.add(f"{topic}/count", 1)
            store.set(f"{topic}/{notes.numbers[topic]}", json.dumps(note))

        notes = self._notes
        return notes.use(write)

    def others(self, topic: str) -> dict[str, Any]:
        """Return the other machines' notes on ``topic``, by key. If there are many, only one launcher should read."""
        notes = self._notes

        def keys(store: Store) -> list[str]:
            numbers = set(range(1, store.add(f"{topic}/count", 0) + 1)) - {notes.numbers.get(topic)}
            return [f"{topic}/{number}" for number in sorted(numbers)]

        return notes.read(keys)

    def count(self, topic: str, amount: int = 0) -> int:
        """Add to the count that all machines share on ``topic``, and return it; 0 if the store does not answer."""
        counts = [0]
        self._notes.use(lambda store: counts.append(store.add(topic, amount)))
        return counts[-1]

    def least(self, topic: str, order: Callable[[Any], Any], note: Any = None) -> Any:
        """Return the least note of all machines, including this one, on ``topic``; ``None`` if there is none.

        Args:
            topic: Holds only this one note.
            order: The sort key. Of two equal notes, the first one stays.
            note: A JSON value. ``None`` only reads.
        """
        notes = [None]

        def offer(store: Store) -> None:
            own_text = "" if note is None else json.dumps(note)
            text = store.compare_set(topic, "", own_text).decode()
            with suppress(ValueError, TypeError, LookupError):  # other processes may have written anything there
                while note is not None and text != own_text and order(note) < order(json.loads(text)):
                    text = store.compare_set(topic, text, own_text).decode()
                notes.append(json.loads(text or "null"))

        self._notes.use(offer)
        return notes[-1]


def open_store(address: tuple[str, int], limit_s: float = _CONNECT_S) -> Store:
    """Connect to a store that runs, for at most ``limit_s``, which is also the limit of each request."""
    limit = timedelta(seconds=limit_s)
    return TCPStore(*address, None, False, timeout=limit, wait_for_workers=False, use_libuv=USE_LIBUV)
