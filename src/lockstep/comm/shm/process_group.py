"""The process group that c10d, the engines and libraries call: its creation, its send queue, unexpected messages."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lockstep.base import activity
from lockstep.comm.rendezvous import poll_until
from lockstep.comm.shm.arguments import CALLS, NEW_NAMES, bind, check
from lockstep.comm.shm.communicator import MAX_RANKS, OK, WENT, Communicator, library
from lockstep.comm.shm.ops import Pieces, ShmOps, contiguous, copy_back
from lockstep.comm.shm.segment import Segment, share_segment
from lockstep.comm.shm.work import STOP_TIMEOUT_S, ShmWork
from lockstep.errors import CollectiveError, LockstepError

_DRAIN_S = 10.0
_open_groups: weakref.WeakSet[CpuProcessGroup] = weakref.WeakSet()
# Groups with a thread that did not end and may still read the segment, which stays mapped until the process ends.
_stuck: list[CpuProcessGroup] = []


class CpuProcessGroup(dist.ProcessGroup):
    """A process group written in Python that exchanges CPU tensors; derived classes implement `_dispatch`.

    It is a ``ProcessGroup``, not a ``Backend``, because torch lets Python derive only from the former. So it replaces
    the whole group in torch, which cannot have a backend for another device as well.
    """

    supports_splitting = False  # ``split_group`` of torch asks

    def __init__(self, store: dist.Store, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only one for subclasses
        self._store, self._name, self._description = store, name, "undefined"
        _open_groups.add(self)

    def stop_threads(self) -> bool:
        """End the group's threads; return whether all have ended. Blocks some seconds at most."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Make calls on this group fail, also calls that other threads are in. Does not block."""
        raise NotImplementedError

    def _dispatch(self, call: str, data: list[Any], opts: Any, **settings: Any) -> Any:
        """Run the operation that c10d calls ``call``; `bind` returned its arguments."""
        raise NotImplementedError

    # --- Methods that c10d requires. Names are kept here, because torch's class keeps them in backend objects only.

    def name(self) -> str:
        """Return the backend's name."""
        return "shm"

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return self.name()

    def setGroupName(self, name: str) -> None:
        """Keep the group's name."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Keep the group's description."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._description

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was created with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self  # torch asks what it gets for attributes of a backend, which a group written in Python may lack

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls that are made from now on."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls that are made from now on."""
        self._set_default_timeout(timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names the ranks that are missing. Collective: every rank."""
        self.barrier(timeout=timeout).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: calls are cheap one by one."""

    def _end_coalescing(self, device: torch.device) -> None:  # type: ignore[override]  # as c10d expects of no work
        """Do nothing."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: counters in the shared memory count the calls."""


def _method(call: str) -> Any:
    def method(self: CpuProcessGroup, *args: Any, pieces: Pieces | None = None, **kwargs: Any) -> Any:
        activity.now.num_calls += 1
        data, opts = bind(call, args, kwargs)
        return self._dispatch(call, data, opts, **({} if pieces is None else {"pieces": pieces}))

    method.__name__ = call
    method.__doc__ = f"Do what c10d's ``{call}`` does. Collective: every rank."
    return method


# They are methods of the class: c10d finds them by name on the Python type that overrides its virtual functions.
for _call in CALLS:
    setattr(CpuProcessGroup, _call, _method(_call))


class ShmProcessGroup(CpuProcessGroup):
    """A group of ranks on one host that exchange CPU tensors through shared memory."""

    def __init__(self, store: dist.Store, comm: Communicator, name: str) -> None:
        super().__init__(store, comm.rank, comm.size, name)
        self.comm = comm
        self.shm_ops = ShmOps(comm, name)
        self._p2p = P2PEngine(comm)
        self._is_open = True

    def allreduce(self, *args: Any, pieces: Pieces | None = None, **kwargs: Any) -> Any:
        """Replace each tensor by its reduction over all ranks. Collective: every rank.

        The call that matters most for speed, with one CPU tensor that the caller will wait for, is made here at once,
        without a thread and without binding arguments. All other calls go the way of the other collectives.

        Args:
            args: Tensors and options, as c10d passes them.
            pieces: From an engine: what to fill the tensor with first.
            kwargs: Arguments by name, in every way that c10d allows.
        """
        tensors, opts = args if len(args) == 2 else (None, None)
        is_awaited = pieces is not None or not getattr(opts, "asyncOp", True)
        if is_awaited and type(tensors) is list and len(tensors) == 1 and tensors[0].is_cpu:
            work = self.shm_ops.all_reduce_at_once(tensors[0], opts, pieces)
            if work is not None:  # else: calls are queued before it, or it needs a copy
                activity.now.num_calls += 1
                return work
        return super().allreduce(*args, pieces=pieces, **kwargs)  # type: ignore[call-overload]

    @override
    def _dispatch(self, call: str, data: list[Any], opts: Any, **settings: Any) -> Any:
        name = NEW_NAMES.get(call, call)
        if not settings:  # an engine that passes pieces has cut them itself
            check(name, data, opts, self.comm.rank, self.comm.ranks)
        return getattr(self.shm_ops, name)(*data, opts, **settings) if opts else getattr(self._p2p, name)(*data)

    @override
    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.comm.timeout_s = timeout.total_seconds()

    # --- The end

    def shutdown(self) -> None:
        """Leave the group after all calls made on it have run."""
        if self._is_open:
            # The other ranks rely on these calls, even if no code on this rank waits for them.
            self.shm_ops.queue.drain()
            self._p2p.drain(_DRAIN_S)
            self._close()

    @override
    def interrupt(self) -> None:
        if self._is_open:
            self.comm.give_up(CollectiveError(f"Rank {self.comm.ranks[self.comm.rank]} left a group that lost a rank."))
            self.comm.stop()

    def abort(self) -> None:
        """Leave the group at once; ranks that wait for this one get an error."""
        if self._is_open:
            rank = self.comm.ranks[self.comm.rank]
            self.comm.give_up(CollectiveError(f"Rank {rank} closed the group after an error; look at its output."))
            self._close()

    def _close(self) -> None:
        if self.stop_threads():
            self.comm.leave()

    @override
    def stop_threads(self) -> bool:
        if not self._is_open:
            return True
        self._is_open = False
        # Threads that wait in C return now. The code below ends the threads that wait for work.
        self.comm.stop()
        have_ended = all([self.shm_ops.queue.stop(), self._p2p.stop()])
        if not have_ended:
            _stuck.append(self)
        return have_ended


@atexit.register
def _stop_all_threads() -> None:
    """End the threads before the interpreter ends: they must not return to an interpreter that is shutting down."""
    for group in list(_open_groups):
        group.stop_threads()
        _stuck.append(group)  # its destructor would leave the group, and ranks that still read would fail


# --- send and receive -------------------------------------------------------------------------------------------------

# How long the thread sleeps before it checks whether the other ranks are alive.
_POLL_MS = 50
ANY_SOURCE = -1


class _Cursor:
    """A contiguous tensor, and how many of its bytes have been moved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_moved = 0

    def move(self, function: Callable[[int, int, int, int], int], handle: int, peer: int) -> bool:
        """Move as many bytes as the ring to or from ``peer`` allows; return whether any byte was moved."""
        before, size = self.num_moved, self.tensor.nbytes
        while self.num_moved < size:
            # Reads from the ring or writes to it, and returns how many bytes it moved.
            count = function(handle, peer, self.tensor.data_ptr() + self.num_moved, size - self.num_moved)
            if count == 0:
                break
            self.num_moved += count
        return self.num_moved > before

    @property
    def is_done(self) -> bool:
        """Whether all bytes have been moved."""
        return self.num_moved == self.tensor.nbytes


class Transfer(ShmWork):
    """A send or a receive.

    Args:
        operation: Its description, for messages.
        peer: The other rank in the group.
        tag: Messages of one pair and tag arrive in order.
        tensor: On the CPU.
        limit_s: Maximum duration.
        receives: Whether bytes arrive.
    """

    def __init__(self, operation: str, peer: int, tag: int, tensor: Tensor, limit_s: float, *, receives: bool) -> None:
        # If a copy is needed, bytes are sent from it or received into it; received bytes are copied back at the end.
        self.data = contiguous(tensor)
        super().__init__(operation, None, lambda: copy_back(self.data, tensor) if receives else None, [tensor])
        self.peer, self.tag = peer, tag
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s
        # What a send writes, in order. The device is named because the script may have set another default device.
        self.parts = (_Cursor(torch.tensor([tag, self.data.nbytes], device="cpu")), _Cursor(self.data))


class _ReceiveBuffer:
    """Data from one rank: the message that is partly read."""

    def __init__(self) -> None:
        self.header = _Cursor(torch.empty(2, dtype=torch.int64, device="cpu"))  # tag and number of bytes
        self.body: _Cursor | None = None  # after the header was read


class P2PEngine:
    """All sends and receives of one rank of a group, with c10d's names.

    [Note: why one thread for all of them]
    Messages between different ranks must not wait for each other: a ring may be full because its reader waits for a
    third rank. So the thread tries all open transfers in turn, and sleeps only when none of them moved any bytes.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        # By rank, only for ranks that were sent to: a ring takes memory once it is written to.
        self._sends: dict[int, deque[Transfer]] = {}
        self._receives: list[Transfer] = []  # in the order of the calls
        self._buffers = [_ReceiveBuffer() for _ in range(comm.size)]
        # Complete messages that no receive has taken yet: from whom, with which tag, and the data.
        self._messages: list[tuple[int, int, Tensor]] = []
        self._ended: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._has_work = threading.Event()
        self._stopped = False

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Transfer:
        """Send a tensor to rank ``to`` of the group."""
        self._comm.ensure_usable("send")
        operation = f"send to rank {self._comm.ranks[to]}"
        transfer = Transfer(operation, to, tag, tensors[0], self._comm.timeout_s, receives=False)
        with self._lock:
            self._sends.setdefault(to, deque()).append(transfer)
            self._wake()
        return transfer

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Transfer:
        """Receive a tensor from rank ``source`` of the group."""
        self._comm.ensure_usable("recv")
        operation = "recv from any rank" if source == ANY_SOURCE else f"recv from rank {self._comm.ranks[source]}"
        transfer = Transfer(operation, source, tag, tensors[0], self._comm.timeout_s, receives=True)
        with self._lock:
            self._receives.append(transfer)
            self._match()  # its message may have arrived already
            self._wake()
        return transfer

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Transfer:
        """Receive a tensor from whichever rank sends one first."""
        return self.recv(tensors, ANY_SOURCE, tag)

    def _match(self) -> None:
        """End the receives whose message has arrived. The lock is held."""
        for transfer in list(self._receives):
            peers = self._peers_of(transfer)
            fits = (place for place, item in enumerate(self._messages) if item[0] in peers and item[1] == transfer.tag)
            place = next(fits, None)
            if place is None:
                continue
            self._receives.remove(transfer)
            peer, _, message = self._messages[place]
            if message.nbytes == transfer.data.nbytes:
                ctypes.memmove(transfer.data.data_ptr(), message.data_ptr(), message.nbytes)
                del self._messages[place]
                self._end(transfer, source=peer)
            else:
                text = (
                    f"{transfer.operation} has room for {transfer.data.nbytes} bytes, but rank "
                    f"{self._comm.ranks[peer]} sent {message.nbytes}.\nPass tensors of the same shape and dtype."
                )
                self._end(transfer, CollectiveError(text))

    def _peers_of(self, transfer: Transfer) -> Sequence[int]:
        return range(self._comm.size) if transfer.peer == ANY_SOURCE else (transfer.peer,)

    def _wake(self) -> None:
        """Make the thread try all open transfers. The lock is held."""
        self._has_work.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-shm-p2p", daemon=True)
            self._thread.start()
        self._comm.native.lockstep_ring_bell(self._comm.handle, self._comm.rank)

    def stop(self) -> bool:
        """End the thread and fail open transfers; return whether the thread ended in time."""
        self._stopped = True
        self._has_work.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        for transfer in self._open_transfers():
            transfer.fail(CollectiveError(f"The process group was closed before {transfer.operation} could end."))
            transfer.complete_futures()
        return self._thread is None or not self._thread.is_alive()

    def drain(self, limit_s: float) -> None:
        """Wait until all sends are complete, at most ``limit_s``."""
        poll_until(lambda: not any(self._sends.values()), limit_s, 0.001)

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
            # Read before the rings are tried: data that arrives later rings the bell, so the thread does not sleep.
            seen = native.lockstep_bell(handle)
            with self._lock:
                moved = any([*map(self._push, self._sends), *map(self._pull, range(self._comm.size))])
            if not moved:
                native.lockstep_await_bell(handle, seen, _POLL_MS)
                with self._lock:
                    self._fail_hopeless()

    def _push(self, peer: int) -> bool:
        """Write as much as fits into the ring to ``peer``; return whether any byte was written."""
        queue, moved = self._sends[peer], False
        while queue:
            for part in queue[0].parts:
                moved |= part.move(self._comm.native.lockstep_ring_write, self._comm.handle, peer)
                if not part.is_done:  # the ring is full; the reader rings the bell when it has made room
                    return moved
            self._end(queue.popleft())
        return moved

    def _pull(self, peer: int) -> bool:
        """Read the ring from ``peer`` if a receive waits for it; return whether any byte was read."""
        buffer, moved = self._buffers[peer], False
        # A message stays in its ring, and its sender waits, until there is a receive from that rank.
        while buffer.body is not None or any(peer in self._peers_of(transfer) for transfer in self._receives):
            part = buffer.header if buffer.body is None else buffer.body
            moved |= part.move(self._comm.native.lockstep_ring_read, self._comm.handle, peer)
            if not part.is_done:
                break
            tag, num_bytes = buffer.header.tensor.tolist()
            if part is buffer.header:
                buffer.body = _Cursor(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
                continue
            self._messages.append((peer, tag, part.tensor))
            buffer.body, buffer.header.num_moved = None, 0
            self._match()
        return moved

    def _end(self, transfer: Transfer, error: LockstepError | None = None, *, source: int = -1) -> None:
        if error is None:
            transfer.run(source)
        else:
            transfer.fail(error)
        self._ended.append(transfer)  # its futures are completed later, because the lock is held now

    def _fail_hopeless(self) -> None:
        """End the transfers that timed out, or whose peer will not take part any more."""
        for transfer in self._open_transfers():
            # The check of another transfer may have read its message.
            error = None if transfer.has_ended else self._failure_of(transfer)
            if error is not None:
                queue = self._receives if transfer in self._receives else self._sends[transfer.peer]
                queue.remove(transfer)
                self._comm.give_up(error)  # a message may be incomplete, so the ring cannot be used any more
                self._end(transfer, error)

    def _failure_of(self, transfer: Transfer) -> LockstepError | None:
        comm = self._comm
        caller = f"Rank {comm.ranks[comm.rank]} in {transfer.operation}"
        if time.monotonic() > transfer.deadline:
            return CollectiveError(
                f"{caller} waited {transfer.limit_s:g} s.\nThe other rank is stopped or stuck, or does not take part."
            )
        from_any = transfer.peer == ANY_SOURCE
        for peer in self._peers_of(transfer):
            code = comm.native.lockstep_peer_state(comm.handle, peer)
            if peer == comm.rank or code == OK or (code == WENT and from_any):
                continue
            # The peer may have sent between the last read of the ring and its end.
            if not from_any and self._pull(peer):
                return None
            return comm.peer_failure(code, caller, peer)
        return None


# --- how the ranks create a group -------------------------------------------------------------------------------------

# How much of a tensor a rank keeps in the segment at a time: small enough for the processor's cache.
CHUNK_BYTES = 2**18


def _ring_bytes(size: int) -> int:
    """Return the size of a ring. There is one per ordered pair of ranks, so it shrinks as ``size`` grows."""
    return max(2**12, 2**17 // size // 2**12 * 2**12)


def join_shm(segment: Segment, store: dist.Store, members: Sequence[int], options: Any) -> ShmProcessGroup:
    """Return the group of the ranks that have mapped ``segment``. Collective: every one of them.

    Args:
        segment: What `share_memory` returned.
        store: As for `share_memory`.
        members: Their ranks in the group that c10d asks for, in the order of their ranks in this one.
        options: c10d's ``_DistributedBackendOptions`` of that group.
    """
    native, rank, size = library(), members.index(options.group_rank), len(members)
    assert not isinstance(native, str), "there is a segment"
    # Every rank writes the same values before it joins.
    native.lockstep_format(segment.address, CHUNK_BYTES, _ring_bytes(size))
    names = options.global_ranks_in_group or range(options.group_size)
    timeout_s = options.timeout.total_seconds()
    comm = Communicator(native, segment, rank, size, [names[member] for member in members], timeout_s)
    await_all(store, "joined", size)  # only from now on may others check whether this rank is alive
    return ShmProcessGroup(options.store, comm, str(options.group_id))


def await_all(store: dist.Store, key: str, size: int) -> None:
    """Wait until all ranks have called this. Takes three requests per rank, however many ranks there are."""
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/done", "")
    store.wait([f"{key}/done"])


def agree(store: dist.Store, objection: str, size: int) -> str:
    """Return the first objection of any rank on every rank; empty if there is none."""
    if objection:
        store.compare_set("objection", "", objection)
    await_all(store, "answered", size)
    return store.get("objection").decode() if store.check(["objection"]) else ""


def share_memory(store: dist.Store, rank: int, size: int) -> tuple[Segment | None, str]:
    """Return a segment that all ranks have mapped, or ``None`` and why not. Collective: every rank.

    All ranks decide the same: each tries to map it, and one failure counts for all.
    """
    if size > MAX_RANKS:
        return None, f"it serves up to {MAX_RANKS} ranks"
    native = library()

    def broadcast(offer: bytes) -> bytes:
        if rank == 0:
            store.set("offer", offer.hex())
            return offer
        return bytes.fromhex(store.get("offer").decode())

    answer = partial(agree, store, size=size)
    if isinstance(native, str):
        return share_segment(rank, 0, broadcast, answer, objection=native)
    return share_segment(rank, native.lockstep_segment_bytes(size, CHUNK_BYTES, _ring_bytes(size)), broadcast, answer)
