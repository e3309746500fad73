"""The process group that c10d, the engines and libraries talk to; each call goes to what serves the tensors' device."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import progress
from lockstep.comm.shm.calls import Calls
from lockstep.comm.shm.member import Member
from lockstep.comm.shm.messages import Messages
from lockstep.comm.shm.movements import Movements
from lockstep.comm.shm.other_devices import OtherDevices
from lockstep.comm.shm.p2p import Post
from lockstep.comm.shm.reductions import Reductions
from lockstep.errors import CollectiveError

_DRAIN_S = 10.0
_alive: weakref.WeakSet[ShmProcessGroup] = weakref.WeakSet()

_CALLS = {
    Reductions: (
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
    ),
    Movements: (
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
    ),
    Messages: ("send", "recv", "recv_anysource"),
}
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

    def __init__(self, store: dist.Store, member: Member, name: str, options: Any) -> None:
        super().__init__(member.rank, member.size)  # type: ignore[call-arg]  # the only one for subclasses
        self._store = store
        self._names = {"name": name, "description": "undefined"}
        self.calls = Calls(member, name)
        self._post = Post(member)
        self._reductions = Reductions(self.calls)
        served = (self._reductions, Movements(self.calls), Messages(member, self._post))
        self._served: dict[str, Callable[..., Any]] = {
            call: getattr(part, call) for part in served for call in _CALLS[type(part)]
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
        self.calls.member.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Replace each tensor by its reduction over all ranks. Collective: every rank."""
        progress.now.num_calls += 1
        if not getattr(opts, "asyncOp", True) and len(tensors) == 1 and tensors[0].is_cpu:
            work = self._reductions.all_reduce_at_once(tensors[0], opts)
            if work is not None:
                return work
        return self._dispatch("allreduce", tensors, opts)

    def _dispatch(self, call: str, *args: Any, **kwargs: Any) -> Any:
        progress.now.num_calls += 1
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
            self.calls.queue.drain()
            self._post.drain(_DRAIN_S)
            self._close(abort=False)

    def abort(self) -> None:
        """Leave the group at once; ranks that wait for this one hear of it."""
        if self._is_open:
            member = self.calls.member
            rank = member.ranks[member.rank]
            member.give_up(CollectiveError(f"Rank {rank} closed the group after an error; look at its output."))
            self._close(abort=True)

    def _close(self, *, abort: bool) -> None:
        self._is_open = False
        self._others.close(abort=abort)
        self.calls.member.stop()
        # A thread that does not end may still look at the segment: then it stays mapped until the process ends.
        if all([self.calls.queue.stop(), self._post.stop()]):
            self.calls.member.leave()
        else:
            _stuck.append(self)


_stuck: list[ShmProcessGroup] = []
_TAKES_TENSORS = {
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
}
"""Calls whose first argument is one tensor; the others take a list, for which callers may pass one tensor, too."""


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


for _call in [*(call for calls in _CALLS.values() for call in calls if call != "allreduce"), *_OLD_NAMES]:
    setattr(ShmProcessGroup, _call, _method(_call))


@atexit.register
def _stop_threads() -> None:
    """End the threads before the interpreter goes: they would come back into what is being taken down."""
    for group in list(_alive):
        if group._is_open:
            group._is_open = False
            group.calls.member.stop()
            group.calls.queue.stop()
            group._post.stop()
            _stuck.append(group)
