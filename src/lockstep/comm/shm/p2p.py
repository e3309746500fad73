"""Send and receive: one ring of bytes for each ordered pair of ranks, moved along by a thread of their own.

[Note: why one thread for all of them]
Messages between different ranks must not wait for each other: a ring may be full because its reader waits for a
third rank. So the thread tries all that are open, one after the other, and sleeps only when none of them moves.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lockstep.comm.shm.communicator import OK, WENT, Communicator
from lockstep.comm.shm.ops import contiguous, copy_back
from lockstep.comm.shm.work import STOP_TIMEOUT_S, ShmWork
from lockstep.errors import CollectiveError, LockstepError

_HEADER = struct.Struct("=qQ")
"""Tag and number of bytes."""

_POLL_MS = 50
"""How long the thread sleeps before it checks whether the other ranks still live."""

ANY_SOURCE = -1

MoveBytes = Callable[[int, int, int, int], int]
"""Reads from a ring or writes to it: called with the group, the other rank, the address and the number of bytes that
are left; returns how many it moved."""


class _Cursor:
    """Bytes of which some have been moved; ``owner`` keeps the memory alive."""

    def __init__(self, owner: bytearray | Tensor) -> None:
        self.owner = owner
        if isinstance(owner, Tensor):
            self.start, self.size = owner.data_ptr(), owner.nbytes
        else:
            self.start = ctypes.addressof((ctypes.c_char * len(owner)).from_buffer(owner)) if owner else 0
            self.size = len(owner)
        self._num_moved = 0

    def move(self, function: MoveBytes, handle: int, peer: int) -> bool:
        """Move as much as the ring allows; return whether that was anything."""
        before = self._num_moved
        while self._num_moved < self.size:
            count = function(handle, peer, self.start + self._num_moved, self.size - self._num_moved)
            if count == 0:
                break
            self._num_moved += count
        return self._num_moved > before

    @property
    def is_done(self) -> bool:
        """Whether all has been moved."""
        return self._num_moved == self.size


class Transfer(ShmWork):
    """A send or a receive.

    Args:
        operation: In words, for messages.
        peer: The other rank in the group.
        tag: Messages of one pair and tag arrive in order.
        data: Contiguous, on the CPU.
        limit_s: How long it may take.
        finish: Called after a receive.
    """

    def __init__(
        self, operation: str, peer: int, tag: int, data: Tensor, limit_s: float, finish: Callable[[], None]
    ) -> None:
        super().__init__(operation, None, finish, [data])
        self.peer, self.tag = peer, tag
        self.payload = _Cursor(data)
        self.header = _Cursor(bytearray(_HEADER.pack(tag, data.nbytes)))
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s


class _ReceiveBuffer:
    """What arrives from one rank: who waits for it, and the message that is half read."""

    def __init__(self) -> None:
        self.wanted: deque[Transfer] = deque()
        self.unexpected: deque[tuple[int, _Cursor]] = deque()  # whole messages with tags that nobody has asked for
        self.header = _Cursor(bytearray(_HEADER.size))
        self.target: Transfer | None = None  # who gets the message; nobody yet if its tag is not wanted
        self.body: _Cursor | None = None
        self.tag = 0


class P2PEngine:
    """All sends and receives of one rank of a group, as c10d calls them."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        # By rank; only for ranks that anything was sent to, as a ring takes memory when it is first written.
        self._sends: dict[int, deque[Transfer]] = {}
        self._buffers = [_ReceiveBuffer() for _ in range(comm.size)]
        self._from_any: deque[Transfer] = deque()
        self._ended: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._has_work = threading.Event()
        self._stopped = False

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Transfer:
        """Send a tensor to rank ``to`` of the group."""
        self._comm.ensure_usable("send")
        (tensor,) = tensors
        what = f"send to rank {self._comm.ranks[to]}"
        transfer = Transfer(what, to, tag, contiguous(tensor), self._comm.timeout_s, lambda: None)
        with self._lock:
            return self._start(self._sends.setdefault(to, deque()), transfer)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Transfer:
        """Receive a tensor from rank ``source`` of the group."""
        self._comm.ensure_usable("recv")
        (tensor,) = tensors
        # Where a copy is needed, bytes arrive there and are copied back by the action of the work.
        data = contiguous(tensor)
        what = "recv from any rank" if source == ANY_SOURCE else f"recv from rank {self._comm.ranks[source]}"
        transfer = Transfer(what, source, tag, data, self._comm.timeout_s, lambda: copy_back(data, tensor))
        with self._lock:
            return self._start(self._from_any if source == ANY_SOURCE else self._buffers[source].wanted, transfer)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Transfer:
        """Receive a tensor from whichever rank sends one first."""
        return self.recv(tensors, ANY_SOURCE, tag)

    def _start(self, queue: deque[Transfer], transfer: Transfer) -> Transfer:
        """Queue a transfer, and wake the thread; the lock is held."""
        queue.append(transfer)
        self._has_work.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-shm-p2p", daemon=True)
            self._thread.start()
        self._comm.native.lockstep_ring_bell(self._comm.handle, self._comm.rank)
        return transfer

    def stop(self) -> bool:
        """End the thread, and fail what is open; return whether it ended in time."""
        self._stopped = True
        self._has_work.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        for transfer in self._open_transfers():
            transfer.fail(CollectiveError(f"The process group was closed before {transfer.operation} could end."))
            transfer.complete_futures()
        return self._thread is None or not self._thread.is_alive()

    def drain(self, limit_s: float) -> None:
        """Wait until what was sent has left, at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while any(self._sends.values()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _queues(self) -> Iterator[deque[Transfer]]:
        yield from self._sends.values()
        yield self._from_any
        yield from (buffer.wanted for buffer in self._buffers)

    def _open_transfers(self) -> list[Transfer]:
        partly = [buffer.target for buffer in self._buffers if buffer.target is not None]
        return [*partly, *(transfer for queue in self._queues() for transfer in queue)]

    def _run(self) -> None:
        native, handle = self._comm.native, self._comm.handle
        while not self._stopped:
            self._has_work.clear()
            with self._lock:
                is_idle = not self._open_transfers()
                ended, self._ended = self._ended, []
            for transfer in ended:  # without the lock, as callbacks may send
                transfer.complete_futures()
            if is_idle and not ended and not self._stopped:
                self._has_work.wait()
                continue
            # Read before the rings are tried: what arrives after that rings the bell, so that nobody sleeps over it.
            seen = native.lockstep_bell(handle)
            with self._lock:
                moved = any([*map(self._push, self._sends), *map(self._pull, range(self._comm.size))])
            if not moved:
                native.lockstep_await_bell(handle, seen, _POLL_MS)
                with self._lock:
                    self._fail_hopeless()

    def _push(self, peer: int) -> bool:
        """Write what there is room for in the ring to ``peer``; return whether that was anything."""
        queue, moved = self._sends[peer], False
        while queue:
            for part in (queue[0].header, queue[0].payload):
                moved |= part.move(self._comm.native.lockstep_ring_write, self._comm.handle, peer)
                if not part.is_done:  # the ring is full; the reader rings the bell when it has made room
                    return moved
            self._succeed(queue.popleft())
        return moved

    def _pull(self, peer: int) -> bool:
        """Read what is in the ring from ``peer``, if anybody wants it; return whether that was anything."""
        buffer, moved = self._buffers[peer], False
        while True:
            if buffer.body is None:
                self._serve_unexpected(peer, buffer)
                # A message waits in its ring until somebody asks for one from that rank.
                if not buffer.wanted and not self._from_any:
                    return moved
            part = buffer.header if buffer.body is None else buffer.body
            moved |= part.move(self._comm.native.lockstep_ring_read, self._comm.handle, peer)
            if not part.is_done:
                return moved
            if part is buffer.header:
                assert isinstance(part.owner, bytearray)
                buffer.tag, num_bytes = _HEADER.unpack(part.owner)
                buffer.header = _Cursor(part.owner)
                # Straight into the tensor of who waits for it; with another tag it is kept until somebody asks.
                buffer.target = self._match(peer, buffer, buffer.tag, num_bytes)
                buffer.body = _Cursor(bytearray(num_bytes)) if buffer.target is None else buffer.target.payload
            elif buffer.target is not None:
                self._succeed(buffer.target, peer)
                buffer.target = buffer.body = None
            else:
                buffer.unexpected.append((buffer.tag, part))
                buffer.body = None

    def _succeed(self, transfer: Transfer, source: int = -1) -> None:
        transfer.run(source)
        self._ended.append(transfer)

    def _fail(self, transfer: Transfer, error: LockstepError) -> None:
        transfer.fail(error)
        self._ended.append(transfer)

    def _match(self, peer: int, buffer: _ReceiveBuffer, tag: int, num_bytes: int) -> Transfer | None:
        """Take out the oldest receive of a message with ``tag``; one of another size fails."""
        for queue in (buffer.wanted, self._from_any):
            transfer = next((transfer for transfer in queue if transfer.tag == tag), None)
            if transfer is None:
                continue
            queue.remove(transfer)
            if transfer.payload.size == num_bytes:
                return transfer
            text = (
                f"{transfer.operation} has room for {transfer.payload.size} bytes, but rank {self._comm.ranks[peer]} "
                f"sent {num_bytes}.\nPass tensors of the same shape and dtype."
            )
            self._fail(transfer, CollectiveError(text))
            return None
        return None

    def _serve_unexpected(self, peer: int, buffer: _ReceiveBuffer) -> None:
        for entry in list(buffer.unexpected):
            tag, message = entry
            transfer = self._match(peer, buffer, tag, message.size)
            if transfer is not None:
                buffer.unexpected.remove(entry)
                ctypes.memmove(transfer.payload.start, message.start, message.size)
                self._succeed(transfer, peer)

    def _fail_hopeless(self) -> None:
        """End the transfers whose time is up, or whose peer will not come."""
        for transfer in self._open_transfers():
            error = self._failure_of(transfer)
            if error is None:
                continue
            # From wherever it is: it may be waiting, or half read.
            for queue in self._queues():
                if transfer in queue:
                    queue.remove(transfer)
            for buffer in self._buffers:
                if buffer.target is transfer:
                    buffer.target = buffer.body = None
            self._comm.give_up(error)  # a message may have been cut in two, so the ring is of no use any more
            self._fail(transfer, error)

    def _failure_of(self, transfer: Transfer) -> LockstepError | None:
        comm = self._comm
        where = f"Rank {comm.ranks[comm.rank]} in {transfer.operation}"
        if time.monotonic() > transfer.deadline:
            return CollectiveError(
                f"{where} waited {transfer.limit_s:g} s.\nThe other rank is stopped or stuck, or does not take part."
            )
        from_any = transfer.peer == ANY_SOURCE
        for peer in range(comm.size) if from_any else [transfer.peer]:
            code = comm.native.lockstep_peer_state(comm.handle, peer)
            if peer == comm.rank or code == OK or (code == WENT and from_any):
                continue
            # It may have sent between the last read of the ring and its end.
            if not from_any and self._pull(peer):
                return None
            return comm.peer_failure(code, where, peer)
        return None
