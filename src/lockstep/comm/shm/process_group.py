"""The process group that c10d, the engines and libraries talk to, and how the ranks make it together."""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from collections.abc import Callable
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
from lockstep.comm.shm.segment import NoSharedMemory, Offer, Segment, make_segment, map_segment
from lockstep.errors import CollectiveError, ConfigurationError


class OtherDevices:
    """What ``cuda:nccl`` in ``cpu:shm,cuda:nccl`` asks for.

    torch replaces the whole group by one that is written in Python, so its other backends are made here, each in a
    native group of its own, by the same store.
    """

    def __init__(self, owner: dist.ProcessGroup, store: dist.Store, options: Any) -> None:
        self._owner, self._store, self._options = owner, store, options
        self._groups: dict[str, dist.ProcessGroup] = {}

    def devices(self) -> list[torch.device]:
        """Return the devices for which the group was made with another backend."""
        return [torch.device(device) for device in self._wanted()]

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """Return the native group for ``device``. Collective at the first call for that device: every rank.

        Raises:
            ConfigurationError: The group was not made for that device.
        """
        if device.type not in self._groups:
            name = self._wanted().get(device.type)
            if name is None:
                raise ConfigurationError(
                    f"The backend shm moves CPU tensors, but this one is on {device}.\n"
                    f"Make the group with init_process_group('cpu:shm,{device.type}:nccl')."
                )
            self._groups[device.type] = self._make(device, name)
        return self._groups[device.type]

    def _wanted(self) -> dict[str, str]:
        config = dist.distributed_c10d._world.pg_backend_config.get(self._owner, "")
        pairs = (part.split(":") for part in str(config).split(",") if ":" in part)
        return {device: name for device, name in pairs if device != "cpu" and name != "shm"}

    def _make(self, device: torch.device, name: str) -> dist.ProcessGroup:
        given = self._options
        store = PrefixStore(f"lockstep/{device.type}", self._store)
        group = dist.ProcessGroup(store, given.group_rank, given.group_size)
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = given.timeout
            options.global_ranks_in_group = given.global_ranks_in_group
            options.group_name = given.group_id
            backend: Any = dist.ProcessGroupNCCL(store, given.group_rank, given.group_size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, given.group_rank, given.group_size, timeout=given.timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            raise ConfigurationError(f"Beside shm there can be nccl and gloo, not {name!r}.")
        backend._set_sequence_number_for_group()
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, backend)
        group._set_group_name(dist.distributed_c10d.GroupName(f"{given.group_id}/{device.type}"))
        return group

    def close(self, *, abort: bool) -> None:
        """Leave the native groups; with ``abort`` without waiting for other ranks."""
        while self._groups:
            group = self._groups.popitem()[1]
            if abort:
                group.abort()
            else:
                group.shutdown()


# The process group that c10d, the engines and libraries talk to; each call goes to what serves the tensors' device.

_DRAIN_S = 10.0
_alive: weakref.WeakSet[ShmProcessGroup] = weakref.WeakSet()

_OPS = (
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)
_P2P = ("send", "recv", "recv_anysource")
_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
"""What torch called them before 2.13."""


class ShmProcessGroup(dist.ProcessGroup):
    """A group of ranks on one host that exchange CPU tensors through shared memory.

    It is a ``ProcessGroup``, not a ``Backend``, as torch lets Python derive only from the former. So it also stands
    before the backends of other devices that the group was made with, as in ``cpu:shm,cuda:nccl``.
    """

    def __init__(self, store: dist.Store, comm: Communicator, name: str, options: Any) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # the only one for subclasses
        self._store = store
        self._names = {"name": name, "description": "undefined"}
        self.comm = comm
        self.shm_ops = ShmOps(comm, name)
        self._p2p = P2PEngine(comm)
        self._served: dict[str, Callable[..., Any]] = {
            **{call: getattr(self.shm_ops, call) for call in ("allreduce", *_OPS)},
            **{call: getattr(self._p2p, call) for call in _P2P},
        }
        self._others = OtherDevices(self, store, options)
        self._is_open = True
        _alive.add(self)

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "shm"

    def setGroupName(self, name: str) -> None:
        """Remember the group's name; torch's class keeps names in backend objects only."""
        self._names["name"] = name

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:
        """Remember what the group is for."""
        self._names["description"] = description

    def getGroupDesc(self) -> str:
        """Return what the group is for."""
        return self._names["description"]

    def name(self) -> str:
        """Return the backend's name."""
        return "shm"

    def get_group_store(self) -> dist.Store:
        """Return the store by which the ranks met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self._others.devices()]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.type == "cpu":
            raise RuntimeError("shm serves CPU tensors itself; it has no backend object.")
        return self._others.group_for(device)._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls that are made from now on may wait."""
        self.comm.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Replace each tensor by its reduction over all ranks. Collective: every rank."""
        activity.now.num_calls += 1
        if not getattr(opts, "asyncOp", True) and len(tensors) == 1 and tensors[0].is_cpu:
            work = self.shm_ops.all_reduce_at_once(tensors[0], opts)
            if work is not None:
                return work
        return self._dispatch("allreduce", tensors, opts)

    def _dispatch(self, call: str, *args: Any, **kwargs: Any) -> Any:
        activity.now.num_calls += 1
        device = _device_of(args)
        if device is not None and device.type != "cpu":
            return getattr(self._others.group_for(device), call)(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and call not in _TAKES_TENSORS:
            args = ([args[0]], *args[1:])
        return self._served[_OLD_NAMES.get(call, call)](*args, **kwargs)

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type != "cpu":
            self._others.group_for(torch.device(device))._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            return self._others.group_for(torch.device(device))._end_coalescing(device)
        return None

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the shared words count the calls."""

    def shutdown(self) -> None:
        """Leave the group, after what was called on it has run."""
        if self._is_open:
            self.shm_ops.queue.drain()
            self._p2p.drain(_DRAIN_S)
            self._close(abort=False)

    def abort(self) -> None:
        """Leave the group at once; ranks that wait for this one learn of it."""
        if self._is_open:
            rank = self.comm.ranks[self.comm.rank]
            self.comm.give_up(CollectiveError(f"Rank {rank} closed the group after an error; look at its output."))
            self._close(abort=True)

    def _close(self, *, abort: bool) -> None:
        self._others.close(abort=abort)
        if self._stop_threads():
            self.comm.leave()

    def _stop_threads(self) -> bool:
        """End the threads; return whether none of them can touch the segment any more."""
        self._is_open = False
        self.comm.stop()
        have_ended = all([self.shm_ops.queue.stop(), self._p2p.stop()])
        if not have_ended:
            _stuck.append(self)
        return have_ended


_stuck: list[ShmProcessGroup] = []
"""Groups with a thread that does not end and may still look at the segment: it stays mapped until the process ends."""

_TAKES_TENSORS = {
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
}
"""OpRunner whose first argument is one tensor; the others take a list, for which callers may pass one tensor, too."""


def _device_of(args: Any) -> torch.device | None:
    """Return the device of the first tensor among nested arguments, or what options of a barrier say."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)):
            found = _device_of(arg)
            if found is not None:
                return found
    return None


def _method(call: str) -> Any:
    def method(self: ShmProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._dispatch(call, *args, **kwargs)

    method.__name__ = call
    method.__doc__ = f"Do what c10d's ``{call}`` does. Collective: every rank."
    return method


for _call in (*_OPS, *_P2P, *_OLD_NAMES):
    setattr(ShmProcessGroup, _call, _method(_call))


@atexit.register
def _stop_all_threads() -> None:
    """End the threads before the interpreter goes: they would come back into what is being taken down."""
    for group in list(_alive):
        if group._is_open and group._stop_threads():
            _stuck.append(group)  # the destructor would leave the group, and ranks that still read would fail


CHUNK_BYTES = 2**18
"""How much of a tensor a rank has in the segment at a time: small enough for the processor's cache."""

MIN_CHUNK_BYTES = 2**16


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
    segment, reason = _share(store, native, rank, size)
    if isinstance(native, str) or segment is None:
        if rank == 0:
            print(f"lockstep: no shm for this group, Gloo serves it: {reason}.", file=sys.stderr)
        return dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
    ranks = options.global_ranks_in_group
    comm = Communicator(native, segment, rank, size, ranks, options.timeout.total_seconds())
    _await_all(store, "joined", size)  # only now may anybody check whether this rank lives
    return ShmProcessGroup(options.store, comm, str(options.group_id), options)


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
    segment, objection = None, native if isinstance(native, str) else ""
    if rank == 0:
        offer = b""
        if not objection:
            try:
                segment, made = _make(native, size)
                offer = made.pack()
            except NoSharedMemory as error:
                objection = str(error)
        store.set("offer", offer.hex())
    elif (text := store.get("offer").decode()) and not objection:
        try:
            segment = map_segment(Offer.unpack(bytes.fromhex(text)))
        except NoSharedMemory as error:
            objection = str(error)
    if objection:
        store.compare_set("objection", "", objection)  # the first counts
    _await_all(store, "answered", size)
    objection = store.get("objection").decode() if store.check(["objection"]) else ""
    if objection and segment is not None:
        segment.close_file()
        segment = None
    return segment, objection


def _make(native: Any, size: int) -> tuple[Segment, Offer]:
    """Make and format a segment for ``size`` ranks, with smaller chunks where memory is short."""
    chunk_bytes, ring_bytes = CHUNK_BYTES, _ring_bytes(size)
    while True:
        try:
            segment, offer = make_segment(native.lockstep_segment_bytes(size, chunk_bytes, ring_bytes))
        except NoSharedMemory:
            if chunk_bytes <= MIN_CHUNK_BYTES:
                raise
            chunk_bytes //= 2
            continue
        native.lockstep_format(segment.address, chunk_bytes, ring_bytes)
        return segment, offer
