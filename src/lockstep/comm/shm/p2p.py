"""Send and receive: one ring of bytes for each ordered pair of ranks, moved along by a thread of their own."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.shm.communicator import OK, WENT, Communicator
from lockstep.comm.shm.ops import contiguous, copy_back
from lockstep.comm.shm.work import STOP_TIMEOUT_S, ShmWork
from lockstep.errors import CollectiveError, LockstepError

# How long the thread sleeps before it checks whether the other ranks still live.
_POLL_MS = 50
ANY_SOURCE = -1


class _Cursor:
    """A contiguous tensor of which some bytes have been moved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_moved = 0

    def move(self, function: Callable[[int, int, int, int], int], handle: int, peer: int) -> bool:
        """Move as much as the ring to or from ``peer`` allows; return whether that was anything."""
        before, size = self.num_moved, self.tensor.nbytes
        while self.num_moved < size:
            # It reads from the ring or writes to it, and returns how many bytes it moved.
            count = function(handle, peer, self.tensor.data_ptr() + self.num_moved, size - self.num_moved)
            if count == 0:
                break
            self.num_moved += count
        return self.num_moved > before

    @property
    def is_done(self) -> bool:
        """Whether all has been moved."""
        return self.num_moved == self.tensor.nbytes


class Transfer(ShmWork):
    """A send or a receive.

    Args:
        operation: In words, for messages.
        peer: The other rank in the group.
        tag: Messages of one pair and tag arrive in order.
        data: Contiguous, on the CPU.
        limit_s: How long it may take.
        finish: Called at the end.
    """

    def __init__(
        self, operation: str, peer: int, tag: int, data: Tensor, limit_s: float, finish: Callable[[], None]
    ) -> None:
        super().__init__(operation, None, finish, [data])
        self.peer, self.tag, self.data = peer, tag, data
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s
        self.is_matched = False  # a receive: its message has begun to arrive
        # What a send writes, one after the other. The script may have chosen another default device.
        self.parts = (_Cursor(torch.tensor([tag, data.nbytes], device="cpu")), _Cursor(data))


class _ReceiveBuffer:
    """What arrives from one rank: the message that is half read, and those that nobody has asked for."""

    def __init__(self) -> None:
        self.header = _Cursor(torch.empty(2, dtype=torch.int64, device="cpu"))  # tag and number of bytes
        self.body: _Cursor | None = None  # once the header is there
        self.target: Transfer | None = None  # who gets the message; nobody yet if its tag is not wanted
        self.unexpected: list[tuple[int, Tensor]] = []  # whole messages, with their tags


class P2PEngine:
    """All sends and receives of one rank of a group, as c10d calls them.

    [Note: why one thread for all of them]
    Messages between different ranks must not wait for each other: a ring may be full because its reader waits for a
    third rank. So the thread tries all that are open, one after the other, and sleeps only when none of them moves.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        # By rank; only for ranks that anything was sent to, as a ring takes memory when it is first written.
        self._sends: dict[int, deque[Transfer]] = {}
        self._receives: list[Transfer] = []  # in the order of the calls
        self._buffers = [_ReceiveBuffer() for _ in range(comm.size)]
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
            self._sends.setdefault(to, deque()).append(transfer)
            self._wake()
        return transfer

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Transfer:
        """Receive a tensor from rank ``source`` of the group."""
        self._comm.ensure_usable("recv")
        (tensor,) = tensors
        # Where a copy is needed, bytes arrive there and are copied back by the action of the work.
        data = contiguous(tensor)
        what = "recv from any rank" if source == ANY_SOURCE else f"recv from rank {self._comm.ranks[source]}"
        transfer = Transfer(what, source, tag, data, self._comm.timeout_s, lambda: copy_back(data, tensor))
        with self._lock:
            if not self._take_unexpected(transfer):
                self._receives.append(transfer)
            self._wake()
        return transfer

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Transfer:
        """Receive a tensor from whichever rank sends one first."""
        return self.recv(tensors, ANY_SOURCE, tag)

    def _take_unexpected(self, transfer: Transfer) -> bool:
        """End a receive whose message is there already; the lock is held."""
        for peer, buffer in enumerate(self._buffers):
            if transfer.peer not in (peer, ANY_SOURCE):
                continue
            for index, (tag, message) in enumerate(buffer.unexpected):
                if tag == transfer.tag:
                    if self._has_room(transfer, peer, message.nbytes):
                        ctypes.memmove(transfer.data.data_ptr(), message.data_ptr(), message.nbytes)
                        del buffer.unexpected[index]
                        self._end(transfer, source=peer)
                    return True
        return False

    def _wake(self) -> None:
        """Have the thread try all that is open; the lock is held."""
        self._has_work.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-shm-p2p", daemon=True)
            self._thread.start()
        self._comm.native.lockstep_ring_bell(self._comm.handle, self._comm.rank)

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

    def _open_transfers(self) -> list[Transfer]:
        return [*self._receives, *(transfer for queue in self._sends.values() for transfer in queue)]

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
            for part in queue[0].parts:
                moved |= part.move(self._comm.native.lockstep_ring_write, self._comm.handle, peer)
                if not part.is_done:  # the ring is full; the reader rings the bell when it has made room
                    return moved
            self._end(queue.popleft())
        return moved

    def _pull(self, peer: int) -> bool:
        """Read what is in the ring from ``peer``, if anybody wants it; return whether that was anything."""
        buffer, moved = self._buffers[peer], False
        # A message waits in its ring until somebody asks for one from that rank.
        while buffer.body is not None or self._wanted_from(peer):
            part = buffer.header if buffer.body is None else buffer.body
            moved |= part.move(self._comm.native.lockstep_ring_read, self._comm.handle, peer)
            if not part.is_done:
                break
            tag, num_bytes = buffer.header.tensor.tolist()
            if part is buffer.header:
                # Straight into the tensor of who waits for it; with another tag it is kept until somebody asks.
                target = next((transfer for transfer in self._wanted_from(peer) if transfer.tag == tag), None)
                if target is not None and not self._has_room(target, peer, num_bytes):
                    self._receives.remove(target)
                    target = None
                if target is not None:
                    target.is_matched = True
                buffer.target = target
                body = torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if target is None else target.data
                buffer.body = _Cursor(body)
                continue
            if buffer.target is None:
                buffer.unexpected.append((tag, part.tensor))
            elif buffer.target in self._receives:  # else it has failed meanwhile
                self._receives.remove(buffer.target)
                self._end(buffer.target, source=peer)
            buffer.target = buffer.body = None
            buffer.header.num_moved = 0
        return moved

    def _wanted_from(self, peer: int) -> list[Transfer]:
        return [each for each in self._receives if each.peer in (peer, ANY_SOURCE) and not each.is_matched]

    def _has_room(self, transfer: Transfer, peer: int, num_bytes: int) -> bool:
        """Return whether a message fits; a receive that it does not fit fails."""
        if transfer.data.nbytes == num_bytes:
            return True
        text = (
            f"{transfer.operation} has room for {transfer.data.nbytes} bytes, but rank {self._comm.ranks[peer]} "
            f"sent {num_bytes}.\nPass tensors of the same shape and dtype."
        )
        self._end(transfer, CollectiveError(text))
        return False

    def _end(self, transfer: Transfer, error: LockstepError | None = None, *, source: int = -1) -> None:
        if error is None:
            transfer.run(source)
        else:
            transfer.fail(error)
        self._ended.append(transfer)  # its futures are completed later, as the lock is held

    def _fail_hopeless(self) -> None:
        """End the transfers whose time is up, or whose peer will not come."""
        for transfer in self._open_transfers():
            # The check of another one may have read its message.
            error = None if transfer.has_ended else self._failure_of(transfer)
            if error is not None:
                queue = self._receives if transfer in self._receives else self._sends[transfer.peer]
                queue.remove(transfer)
                self._comm.give_up(error)  # a message may have been cut in two, so the ring is of no use any more
                self._end(transfer, error)

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
