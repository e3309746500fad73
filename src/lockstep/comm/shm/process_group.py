"""The process group that c10d, the engines and libraries talk to, and how the ranks make it together."""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from lockstep import activity
from lockstep.comm.shm.communicator import MAX_RANKS, Communicator, library
from lockstep.comm.shm.ops import ShmOps
from lockstep.comm.shm.p2p import P2PEngine
from lockstep.comm.shm.segment import Segment, share_segment
from lockstep.errors import CollectiveError, ConfigurationError

_DRAIN_S = 10.0
_alive: weakref.WeakSet[ShmProcessGroup] = weakref.WeakSet()
# Groups with a thread that does not end and may still read the segment: it stays mapped until the process ends.
_stuck: list[ShmProcessGroup] = []


class ShmProcessGroup(dist.ProcessGroup):
    """A group of ranks on one host that exchange CPU tensors through shared memory.

    It is a ``ProcessGroup``, not a ``Backend``, as torch lets Python derive only from the former. So torch puts it in
    the place of the whole group, and no backend of another device can stand beside it.
    """

    def __init__(self, store: dist.Store, comm: Communicator, name: str) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # the only one for subclasses
        self._store, self._name, self._description = store, name, "undefined"
        self.comm = comm
        self.shm_ops = ShmOps(comm, name)
        self._p2p = P2PEngine(comm)
        self._is_open = True
        _alive.add(self)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Replace each tensor by its reduction over all ranks. Collective: every rank."""
        if not getattr(opts, "asyncOp", True) and len(tensors) == 1 and tensors[0].is_cpu:
            work = self.shm_ops.all_reduce_at_once(tensors[0], opts)
            if work is not None:
                activity.now.num_calls += 1
                return work
        return self._dispatch("allreduce", tensors, opts)

    def _dispatch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        activity.now.num_calls += 1
        device = _device_of(args)
        if device is not None and device.type != "cpu":
            raise ConfigurationError(
                f"The backend shm moves CPU tensors, but this one is on {device}.\n"
                "Make a group with init_process_group('cpu:gloo,cuda:nccl')."
            )
        # c10d's own callers pass lists, functional collectives and tests sometimes one tensor.
        if args and isinstance(args[0], Tensor) and name not in _OF_ONE_TENSOR:
            args = ([args[0]], *args[1:])
        return getattr(self._p2p if name in _P2P else self.shm_ops, name)(*args, **kwargs)

    # --- What c10d asks of a group. Names are kept here, because torch's class keeps them in backend objects only.

    def name(self) -> str:
        """Return the backend's name."""
        return "shm"

    getBackendName = name

    def setGroupName(self, name: str) -> None:
        """Keep the group's name."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Keep what the group is for."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return what the group is for."""
        return self._description

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was made with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        raise RuntimeError("shm serves CPU tensors itself; it has no backend object.")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls that are made from now on may wait."""
        self.comm.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: calls are cheap one by one."""

    def _end_coalescing(self, device: torch.device) -> None:  # type: ignore[override]  # as c10d expects of no work
        """Do nothing."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the shared words count the calls."""

    # --- The end

    def shutdown(self) -> None:
        """Leave the group, after what was called on it has run."""
        if self._is_open:
            # Works that nobody waits for have been promised to the other ranks all the same.
            self.shm_ops.queue.drain()
            self._p2p.drain(_DRAIN_S)
            self._close()

    def abort(self) -> None:
        """Leave the group at once; ranks that wait for this one get an error."""
        if self._is_open:
            rank = self.comm.ranks[self.comm.rank]
            self.comm.give_up(CollectiveError(f"Rank {rank} closed the group after an error; look at its output."))
            self._close()

    def _close(self) -> None:
        if self._stop_threads():
            self.comm.leave()

    def _stop_threads(self) -> bool:
        """End the threads; return whether none of them can touch the segment any more."""
        self._is_open = False
        # Threads that wait in C return now; those that wait for work are ended one by one below.
        self.comm.stop()
        have_ended = all([self.shm_ops.queue.stop(), self._p2p.stop()])
        if not have_ended:
            _stuck.append(self)
        return have_ended


@atexit.register
def _stop_all_threads() -> None:
    """End the threads before the interpreter goes: they would come back into what is being taken down."""
    for group in list(_alive):
        if group._is_open and group._stop_threads():
            _stuck.append(group)  # the destructor would leave the group, and ranks that still read would fail


def _device_of(args: Any) -> torch.device | None:
    """Return the device of the first tensor among nested arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)):
            found = _device_of(arg)
            if found is not None:
                return found
    return None


# Calls whose first argument is one tensor; the others take a list, for which callers may pass one tensor, too.
_OF_ONE_TENSOR = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
_P2P = ("send", "recv", "recv_anysource")
_CALLS = (
    *("allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single_coalesced", "broadcast", "allgather"),
    *("allgather_coalesced", "all_gather_single_coalesced", "alltoall", "gather", "scatter", "barrier"),
)
# What torch called them before 2.13.
_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def _method(call: str, name: str) -> Any:
    def method(self: ShmProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._dispatch(name, *args, **kwargs)

    method.__name__ = call
    method.__doc__ = f"Do what c10d's ``{call}`` does. Collective: every rank."
    return method


# As methods of the class, because c10d finds them by name on the Python type that overrides its virtual functions.
for _call in (*_CALLS, *_OF_ONE_TENSOR, *_P2P, *_OLD_NAMES):
    setattr(ShmProcessGroup, _call, _method(_call, _OLD_NAMES.get(_call, _call)))


# How the ranks make a group together.

# How much of a tensor a rank has in the segment at a time: small enough for the processor's cache.
CHUNK_BYTES = 2**18


def _ring_bytes(size: int) -> int:
    """Return the room of a ring. There is one for each ordered pair: all of a rank together stay as large as one."""
    return max(2**12, 2**17 // size // 2**12 * 2**12)


def create_group(options: Any, _: Any = None) -> Any:
    """Return the process group that c10d asks for; where the ranks cannot share memory, Gloo's backend.

    Collective: every rank of the new group. Blocks until all have come. All ranks decide alike, by what each of them
    could really map.

    Args:
        options: c10d's ``_DistributedBackendOptions``.
    """
    rank, size = options.group_rank, options.group_size
    store = PrefixStore("lockstep/shm", options.store)
    native = library()
    # A prefix, as the store is the caller's and has keys of its own.
    segment, reason = _share(store, native, rank, size)
    if isinstance(native, str) or segment is None:
        if rank == 0:
            print(f"lockstep: no shm for this group, Gloo serves it: {reason}.", file=sys.stderr)
        return dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
    # Every rank writes the same, before it joins itself.
    native.lockstep_format(segment.address, CHUNK_BYTES, _ring_bytes(size))
    ranks = options.global_ranks_in_group
    comm = Communicator(native, segment, rank, size, ranks, options.timeout.total_seconds())
    _await_all(store, "joined", size)  # only now may anybody check whether this rank lives
    return ShmProcessGroup(options.store, comm, str(options.group_id))


def why_unavailable(store: dist.Store, rank: int, size: int) -> str:
    """Return why these ranks cannot have a group on shm, the same on all of them; nothing if they can.

    Collective: every rank. Blocks until all have come. Tries what `create_group` does.
    """
    segment, reason = _share(store, library(), rank, size)
    if segment is not None:
        segment.close_file()
    return reason


def _await_all(store: dist.Store, key: str, size: int) -> None:
    """Wait until all ranks have come here: three requests each, however many they are."""
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/done", "")
    store.wait([f"{key}/done"])


def _share(store: dist.Store, native: ctypes.CDLL | str, rank: int, size: int) -> tuple[Segment | None, str]:
    """Return a segment that all ranks have mapped, or ``None`` and why not. Collective: every rank."""
    if size > MAX_RANKS:
        return None, f"it serves up to {MAX_RANKS} ranks"

    def broadcast(offer: bytes) -> bytes:
        if rank == 0:
            store.set("offer", offer.hex())
            return offer
        return bytes.fromhex(store.get("offer").decode())

    def agree(objection: str) -> str:
        if objection:
            store.compare_set("objection", "", objection)  # the first counts
        _await_all(store, "answered", size)
        return store.get("objection").decode() if store.check(["objection"]) else ""

    if isinstance(native, str):
        return share_segment(rank, 0, broadcast, agree, objection=native)
    num_bytes = native.lockstep_segment_bytes(size, CHUNK_BYTES, _ring_bytes(size))
    return share_segment(rank, num_bytes, broadcast, agree)
