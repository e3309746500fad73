"""Send and receive: one ring of bytes for each ordered pair of ranks, moved along by a thread of their own."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from lockstep.comm.shm import communicator as lib
from lockstep.comm.shm.communicator import Communicator, peer_failure
from lockstep.comm.shm.ops import Staged
from lockstep.comm.shm.work import STOP_TIMEOUT_S, ShmWork
from lockstep.errors import CollectiveError, LockstepError

# A message on its way.

HEADER = struct.Struct("=qQ")
"""Tag and number of bytes."""


class Cursor:
    """Bytes of which some have been moved."""

    def __init__(self, storage: bytearray | Tensor) -> None:
        self.storage = storage
        if isinstance(storage, Tensor):
            self._start, self._size = storage.data_ptr(), storage.nbytes
        else:
            self._start = ctypes.addressof((ctypes.c_char * len(storage)).from_buffer(storage)) if storage else 0
            self._size = len(storage)
        self.rewind()

    def rewind(self) -> None:
        """Begin again."""
        self.address, self.num_left = self._start, self._size

    def advance(self, count: int) -> None:
        """Count ``count`` bytes as moved."""
        self.address += count
        self.num_left -= count

    def fill(self, data: bytearray) -> None:
        """Overwrite all bytes."""
        if data:
            ctypes.memmove(self._start, (ctypes.c_char * len(data)).from_buffer(data), len(data))
        self.num_left = 0


class UnexpectedMessage:
    """A message that nobody has asked for yet."""

    def __init__(self, num_bytes: int) -> None:
        self.data = bytearray(num_bytes)
        self.payload = Cursor(self.data)


class ReceiveBuffer:
    """What arrives from one rank: who waits for it, and the message that is half read."""

    def __init__(self) -> None:
        self.wanted: deque[Transfer] = deque()
        self.aside: deque[tuple[int, UnexpectedMessage]] = deque()
        self.header_data = bytearray(HEADER.size)
        self.header = Cursor(self.header_data)
        self.target: Transfer | UnexpectedMessage | None = None
        self.tag = 0


class Transfer(ShmWork):
    """A send or a receive.

    Args:
        what: In words, for messages.
        peer: The other rank in the group.
        tag: Messages of one pair and tag arrive in order.
        data: Contiguous, on the CPU.
        limit_s: How long it may take.
        finish: Called after a receive.
    """

    def __init__(
        self, what: str, peer: int, tag: int, data: Tensor, limit_s: float, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__(None, finish or (lambda: None), [data])
        self.what, self.peer, self.tag = what, peer, tag
        self.payload = Cursor(data)
        self.header = Cursor(bytearray(HEADER.pack(tag, data.nbytes)))
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s
        self._event = threading.Event()

    def succeed(self, source: int = -1) -> None:
        """End: all bytes have been moved."""
        self._source = source
        self.run()

    def _end(self) -> None:
        super()._end()
        self._event.set()

    def _wait_elsewhere(self, limit_s: float) -> None:
        if not self._event.wait(limit_s if limit_s > 0 else None):
            raise CollectiveError(f"{self.what} has not ended within {limit_s:g} s.\nThe other rank may be late.")


# Send and receive: one ring of bytes for each ordered pair of ranks, moved along by a thread of their own.
#
# [Note: why one thread for all of them]
# Messages between different ranks must not wait for each other: a ring may be full because its reader waits for a
# third rank. So the thread tries all that are open, one after the other, and sleeps only when none of them moves. A
# message waits in its ring until somebody asks for one from that rank; those with other tags are put aside.

_LOOK_EVERY_MS = 50
ANY_SOURCE = -1


class P2PEngine:
    """All sends and receives of one member."""

    def __init__(self, member: Communicator) -> None:
        self._member = member
        self._lock = threading.Lock()
        self._outgoing: dict[int, deque[Transfer]] = {}
        self._inboxes = [ReceiveBuffer() for _ in range(member.size)]
        self._anybody: deque[Transfer] = deque()
        self._ended: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._work = threading.Event()
        self._stopped = False

    def send(self, transfer: Transfer) -> None:
        """Take a message to ``transfer.peer``."""
        with self._lock:
            self._outgoing.setdefault(transfer.peer, deque()).append(transfer)
        self._begin()

    def receive(self, transfer: Transfer) -> None:
        """Take a wish for a message from ``transfer.peer``, or from anybody."""
        with self._lock:
            (self._anybody if transfer.peer == ANY_SOURCE else self._inboxes[transfer.peer].wanted).append(transfer)
        self._begin()

    def stop(self) -> bool:
        """End the thread, and fail what is open; say whether it ended in time."""
        self._stopped = True
        self._work.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        for transfer in self._open():
            transfer.fail(CollectiveError(f"The process group was closed before {transfer.what} could end."))
            transfer.tell()
        return self._thread is None or not self._thread.is_alive()

    def drain(self, limit_s: float) -> None:
        """Wait until what was sent has left, at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while any(self._outgoing.values()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _begin(self) -> None:
        self._work.set()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-shm-p2p", daemon=True)
                self._thread.start()
        self._member.native.lockstep_ring_bell(self._member.handle, self._member.rank)

    def _open(self) -> list[Transfer]:
        partly = [inbox.target for inbox in self._inboxes if isinstance(inbox.target, Transfer)]
        queues = [*self._outgoing.values(), self._anybody, *(inbox.wanted for inbox in self._inboxes)]
        return [*partly, *(transfer for queue in queues for transfer in queue)]

    def _run(self) -> None:
        native, handle = self._member.native, self._member.handle
        while not self._stopped:
            self._work.clear()
            with self._lock:
                idle = not self._open()
                ended = self._ended
                self._ended = []
            for transfer in ended:
                transfer.tell()
            if idle and not ended and not self._stopped:
                self._work.wait()
                continue
            seen = native.lockstep_bell(handle)
            with self._lock:
                moved = any([*map(self._push, self._outgoing), *map(self._pull, range(self._member.size))])
            if not moved:
                native.lockstep_await_bell(handle, seen, _LOOK_EVERY_MS)
                with self._lock:
                    self._give_up_the_hopeless()

    def _push(self, peer: int) -> bool:
        """Write what there is room for in the ring to ``peer``; say whether that was anything."""
        queue, moved = self._outgoing[peer], False
        while queue:
            transfer = queue[0]
            for part in (transfer.header, transfer.payload):
                while part.num_left:
                    count = self._member.native.lockstep_ring_write(
                        self._member.handle, peer, part.address, part.num_left
                    )
                    if count == 0:
                        return moved
                    part.advance(count)
                    moved = True
            queue.popleft()
            transfer.succeed()
            self._ended.append(transfer)
        return moved

    def _pull(self, peer: int) -> bool:
        """Read what is in the ring from ``peer``, if anybody wants it; say whether that was anything."""
        inbox, moved = self._inboxes[peer], False
        while True:
            if inbox.target is None:
                self._serve_from_aside(peer, inbox)
                if not inbox.wanted and not self._anybody:
                    return moved
            part = inbox.header if inbox.target is None else inbox.target.payload
            while part.num_left:
                count = self._member.native.lockstep_ring_read(self._member.handle, peer, part.address, part.num_left)
                if count == 0:
                    return moved
                part.advance(count)
                moved = True
            if inbox.target is None:
                inbox.tag, num_bytes = HEADER.unpack(inbox.header_data)
                inbox.header.rewind()
                inbox.target = self._match(peer, inbox, inbox.tag, num_bytes) or UnexpectedMessage(num_bytes)
            else:
                target, inbox.target = inbox.target, None
                if isinstance(target, Transfer):
                    target.succeed(peer)
                    self._ended.append(target)
                else:
                    inbox.aside.append((inbox.tag, target))

    def _match(self, peer: int, inbox: ReceiveBuffer, tag: int, num_bytes: int) -> Transfer | None:
        """Take out the oldest wish for a message with ``tag``; one of another size fails."""
        for queue in (inbox.wanted, self._anybody):
            for transfer in queue:
                if transfer.tag != tag:
                    continue
                queue.remove(transfer)
                if transfer.payload.num_left == num_bytes:
                    return transfer
                transfer.fail(
                    CollectiveError(
                        f"{transfer.what} has room for {transfer.payload.num_left} bytes, but rank "
                        f"{self._member.ranks[peer]} sent {num_bytes}.\nPass tensors of the same shape and dtype."
                    )
                )
                self._ended.append(transfer)
                return None
        return None

    def _serve_from_aside(self, peer: int, inbox: ReceiveBuffer) -> None:
        for tag, stash in list(inbox.aside):
            transfer = self._match(peer, inbox, tag, len(stash.data))
            if transfer is not None:
                inbox.aside.remove((tag, stash))
                transfer.payload.fill(stash.data)
                transfer.succeed(peer)
                self._ended.append(transfer)

    def _give_up_the_hopeless(self) -> None:
        for transfer in self._open():
            error = self._objection(transfer)
            if error is None:
                continue
            for queue in (*self._outgoing.values(), self._anybody, *(inbox.wanted for inbox in self._inboxes)):
                if transfer in queue:
                    queue.remove(transfer)
            for inbox in self._inboxes:
                if inbox.target is transfer:
                    inbox.target = None
            self._member.give_up(error)  # a message may have been cut in two, so the ring is of no use any more
            transfer.fail(error)
            self._ended.append(transfer)

    def _objection(self, transfer: Transfer) -> LockstepError | None:
        member = self._member
        where = f"Rank {member.ranks[member.rank]} in {transfer.what}"
        if time.monotonic() > transfer.deadline:
            return CollectiveError(
                f"{where} waited {transfer.limit_s:g} s.\nThe other rank is stopped or stuck, or does not take part."
            )
        for peer in [transfer.peer] if transfer.peer != ANY_SOURCE else range(member.size):
            code = member.native.lockstep_look(member.handle, peer)
            if peer == member.rank or (code == lib.WENT and transfer.peer == ANY_SOURCE) or code == lib.OK:
                continue
            # It may have sent between the last look into the ring and its end.
            if transfer.peer != ANY_SOURCE and self._pull(peer):
                return None
            return peer_failure(code, member.native, member.handle, where=where, culprit=member.ranks[peer], index=peer)
        return None


# Send and receive as c10d calls them.


class Messages:
    """What one rank sends to and receives from single other ranks."""

    def __init__(self, member: Communicator, post: P2PEngine) -> None:
        self._member, self._post = member, post

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Transfer:
        """Send a tensor to rank ``to`` of the group."""
        self._member.ensure_usable("send")
        (tensor,) = tensors
        # Not a view of the tensor if it has to be copied: then the copy is the message.
        with Staged([tensor], write_back=False) as (data,):
            transfer = Transfer(f"send to rank {self._member.ranks[to]}", to, tag, data, self._member.timeout_s)
        self._post.send(transfer)
        return transfer

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Transfer:
        """Receive a tensor from rank ``source`` of the group."""
        self._member.ensure_usable("recv")
        (tensor,) = tensors
        staged = Staged([tensor])
        (data,) = staged.__enter__()
        who = "any rank" if source == ANY_SOURCE else f"rank {self._member.ranks[source]}"

        def finish() -> None:
            staged.__exit__(None, None, None)

        transfer = Transfer(f"recv from {who}", source, tag, data, self._member.timeout_s, finish)
        self._post.receive(transfer)
        return transfer

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Transfer:
        """Receive a tensor from whichever rank sends one first."""
        return self.recv(tensors, ANY_SOURCE, tag)
