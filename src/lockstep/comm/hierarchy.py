"""The backend ``shm`` on several machines: ranks reduce inside their machine first, then between machines over Gloo.

[Note: hierarchy]
A flat ring over all ranks sends everything over a machine's cable once for each of its ranks. Here, with ``m``
machines, each machine sends ``2 (m - 1) / m`` times the bytes of a tensor, however many ranks it has, in m - 1 messages
instead of one per rank. First, all ranks of a machine reduce the tensor in shared memory. Then each rank is a
*carrier*: over Gloo it reduces one slice with the carriers of the same slice on the other machines. Last, the slices
are gathered in shared memory. If machines have different numbers of ranks, Gloo does everything.

The carriers of a slice sum it once, and the other ranks copy the sum, so all ranks get the same bits.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore
from typing_extensions import override

from lockstep.base import activity
from lockstep.base.containers import grouped
from lockstep.base.torch_internals import backend_of, group_of, leave_unrecorded, set_default_timeout, timeout_of
from lockstep.comm.network import gloo_cause, wait_for_call
from lockstep.comm.shm.arguments import NEW_NAMES, check
from lockstep.comm.shm.communicator import DTYPE_CODES, operation_of
from lockstep.comm.shm.process_group import CpuProcessGroup, ShmProcessGroup, agree, join_shm, share_memory
from lockstep.comm.shm.work import OpQueue, ShmWork
from lockstep.errors import CollectiveError, LockstepError

# The groups of each generation have the same objection.
_log_once = cache(activity.log)

_CPU = torch.device("cpu")
# Gloo computes these as shared memory does, and they can be done in two stages. Gloo does the others, such as the mean.
_STAGED_OPS = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT})


class HierarchicalProcessGroup(CpuProcessGroup):
    """A group of ranks on several machines with several ranks each; see [Note: hierarchy].

    All-reduce, broadcast, all-gather and reduce-scatter of dense CPU tensors run in stages. Gloo does everything else.

    Args:
        store, rank, name: Of the group.
        machines: The ranks of the group by machine, each in ascending order.
        inside: The group of this machine's ranks.
        between: The carriers of this rank's slice, one per machine.
        flat: The group of all ranks, on Gloo.

    Attributes:
        inside, between: As above.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        name: str,
        *,
        machines: Sequence[Sequence[int]],
        inside: ShmProcessGroup,
        between: dist.ProcessGroup,
        flat: dist.ProcessGroup,
    ) -> None:
        super().__init__(store, rank, flat.size(), name)
        self.inside, self.between, self._flat = inside, between, flat
        self._machines = machines
        self._machine = next(index for index, ranks in enumerate(machines) if rank in ranks)
        self._place = inside.rank()
        # The groups' own methods are not used: these count and watch calls as calls of the script.
        self._inside_ops = inside.shm_ops
        self._gloo: Any = backend_of(between, _CPU)
        self._queue = OpQueue(f"lockstep-hierarchy-{name}")
        self._is_open = True

    @override
    def name(self) -> str:
        return "shm+gloo"

    @override
    def _set_default_timeout(self, timeout: timedelta) -> None:
        for group in (self.inside, self.between, self._flat):
            set_default_timeout(backend_of(group, _CPU), timeout)

    # --- collectives ------------------------------------------------------------------------------------------------

    @override
    def _dispatch(self, call: str, data: list[Any], opts: Any, **settings: Any) -> Any:
        stages = _STAGES.get(NEW_NAMES.get(call, call))
        # Of several tensors, these two make one, which Gloo does, too.
        is_one = call not in ("allreduce", "broadcast") or len(data[0]) == 1
        if stages is None or not (is_one and _can_stage(data, opts)):
            return getattr(self._flat, call)(*data, *([] if opts is None else [opts]))
        check(NEW_NAMES.get(call, call), data, opts, self.rank(), range(self.size()))
        work = ShmWork(call, self._queue, lambda: self._run(call, stages, data, opts), _as_list(data[0]))
        # One thread runs the calls one after the other, in the order in which they were made on every rank.
        self._queue.add(work, is_async=getattr(opts, "asyncOp", True))
        return work

    def _run(self, call: str, stages: Callable[..., None], data: list[Any], opts: Any) -> None:
        try:
            # Some calls take lists of tensors, others one tensor.
            loops = isinstance(data[0], list) and call != "allreduce_coalesced"
            for tensors in zip(*data, strict=True) if loops else (data,):
                stages(self, *tensors, opts)
        except LockstepError:
            raise  # an error on this machine, which its other ranks know
        except Exception as error:  # usually Gloo's, which names a socket but no rank
            peers = ", ".join(str(ranks[self._place]) for ranks in self._machines)
            failure = CollectiveError(
                f"Rank {self.rank()} in {call} between machines, with ranks {peers} of the group: "
                f"{gloo_cause(error)}\n"
                "A rank on another machine ended, or did not take part in time, or the network failed."
            )
            self.inside.comm.give_up(failure)  # otherwise the other ranks of this machine would wait for this one
            raise failure from error

    def _all_reduce(self, tensor: Tensor, opts: Any) -> None:
        flat, count = tensor.view(-1), self.inside.size()
        options = _in_this_thread(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp(operation_of(opts))
        self._inside_ops.allreduce([flat], options).wait()
        size = flat.numel() // count
        # The last carrier's slice includes the remainder.
        is_last = self._place == count - 1
        own_slice = flat[self._place * size : None if is_last else (self._place + 1) * size]
        if own_slice.numel():
            wait_for_call(self._gloo.allreduce([own_slice], options))
        if size:
            options = _in_this_thread(_AllgatherOptions())
            self._inside_ops.all_gather_single(flat[: count * size], own_slice[:size], options).wait()
        if flat[count * size :].numel():
            self._broadcast_inside(flat[count * size :], count - 1)

    def _all_reduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> None:
        flat = torch.cat([tensor.view(-1) for tensor in tensors])  # the same memory may be in the list twice
        self._all_reduce(flat, opts)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _broadcast_inside(self, tensor: Tensor, place: int) -> None:
        options = _in_this_thread(dist.BroadcastOptions())
        options.rootRank = place
        self._inside_ops.broadcast([tensor], options).wait()

    def _broadcast(self, tensor: Tensor, opts: Any) -> None:
        machine = next(index for index, ranks in enumerate(self._machines) if opts.rootRank in ranks)
        place = self._machines[machine].index(opts.rootRank)
        if machine == self._machine:
            self._broadcast_inside(tensor, place)
        if self._place == 0:
            options = dist.BroadcastOptions()
            options.rootRank = machine
            wait_for_call(self._gloo.broadcast([tensor], options))
        if machine != self._machine:
            self._broadcast_inside(tensor, 0)

    def _all_gather(self, output: Tensor, tensor: Tensor, opts: Any) -> None:
        parts = output.view(self.size(), tensor.numel())
        own_parts = [parts[ranks[self._place]] for ranks in self._machines]
        own_parts[self._machine].copy_(tensor.view(-1))
        self._exchange([own_parts[self._machine]] * len(own_parts), own_parts)
        rows = [[parts[rank] for rank in ranks] for ranks in zip(*self._machines, strict=True)]
        self._inside_ops.allgather_coalesced(rows, own_parts, _in_this_thread(_AllgatherOptions())).wait()

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, opts: Any) -> None:
        flat = tensor.view(-1)
        # A caller that passes a part of the input as the output does not need the rest of the input.
        if output.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            flat = flat.clone()
        self._inside_ops.allreduce([flat], _in_this_thread(dist.AllreduceOptions())).wait()
        parts = flat.view(self.size(), output.numel())
        sent = [parts[ranks[self._place]] for ranks in self._machines]
        received = torch.empty(len(sent), output.numel(), dtype=tensor.dtype)
        received[self._machine] = sent[self._machine]
        self._exchange(sent, list(received))
        sum_rows(received, output)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send a tensor to each other machine, and receive one from each."""
        for _, work in start_exchange(self._gloo, dict(enumerate(sent)), dict(enumerate(received)), self._machine):
            work.wait(timeout_of(self._gloo))

    def all_reduce_inside(self, tensor: Tensor) -> ShmWork:
        """Start to replace the contiguous ``tensor`` by its sum over the ranks of this machine only.

        Collective: every rank, in the same order among all calls of this group.
        """
        opts = _in_this_thread(dist.AllreduceOptions())
        work = ShmWork("all_reduce", self._queue, lambda: self._inside_ops.allreduce([tensor], opts).wait(), [tensor])
        self._queue.add(work, is_async=True)
        return work

    # --- the end ----------------------------------------------------------------------------------------------------

    @override
    def stop_threads(self) -> bool:
        was_open, self._is_open = self._is_open, False
        return self._queue.stop() if was_open else True

    @override
    def interrupt(self) -> None:
        self.inside.interrupt()  # what runs between machines ends with its connections

    def shutdown(self) -> None:
        """Leave the group after all calls made on it have run."""
        if self._is_open:
            self._queue.drain()
            self.stop_threads()
            self.inside.shutdown()

    def abort(self) -> None:
        """Leave the group at once; ranks that wait for this one get an error."""
        if self._is_open:
            self.inside.abort()
            for group in (self.between, self._flat):
                with suppress(RuntimeError):  # Gloo cannot always abort
                    group.abort()
            self.stop_threads()


_STAGES: dict[str, Callable[..., None]] = {
    "allreduce": HierarchicalProcessGroup._all_reduce,
    "allreduce_coalesced": HierarchicalProcessGroup._all_reduce_coalesced,
    "broadcast": HierarchicalProcessGroup._broadcast,
    "all_gather_single": HierarchicalProcessGroup._all_gather,
    "all_gather_single_coalesced": HierarchicalProcessGroup._all_gather,
    "reduce_scatter_single": HierarchicalProcessGroup._reduce_scatter,
    "reduce_scatter_single_coalesced": HierarchicalProcessGroup._reduce_scatter,
}
_AllgatherOptions = dist.distributed_c10d.AllgatherOptions


def _can_stage(data: Sequence[Any], opts: Any) -> bool:
    """Return whether all tensors can be cut into flat slices and reduced in two stages; equal on every rank."""
    op = operation_of(opts) if hasattr(opts, "reduceOp") or isinstance(opts, dist.ReduceOp) else dist.ReduceOp.SUM
    tensors = [tensor for arg in data for tensor in _as_list(arg)]
    return op in _STAGED_OPS and all(
        tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.dtype in DTYPE_CODES
        for tensor in tensors
    )


def _as_list(data: Any) -> list[Tensor]:
    return [data] if isinstance(data, Tensor) else list(data)


def _in_this_thread(options: Any) -> Any:
    options.asyncOp = False
    return options


# Apart from the tags that a script is likely to use, and below those of compressed exchanges.
_TAG = 2**30 - 1
# By rank.
Tensors = Mapping[int, Tensor]


def start_exchange(
    group: Any, sent: Tensors, received: Tensors, rank: int, tag: int = _TAG
) -> list[tuple[int, dist.Work]]:
    """Start to send tensors to other ranks of ``group``, and to receive tensors from them; return transfers by rank.

    Receives are posted first. A sender begins once it knows that the receiver is ready, and Gloo sends that notice on
    the same connection, after the data already queued there. Gloo's own all-to-all and all-gather send first: over a
    slow link, the peer of a late rank waits until the late rank's tensor is through, so only one direction is in use.

    Args:
        group: A group or backend.
        sent: By rank. Contiguous; empty ones, and this rank's own tensor, are not sent.
        received: By rank, like ``sent``.
        rank: This rank.
        tag: Messages of two ranks with one tag arrive in order.
    """

    def start(transfer: Callable[..., dist.Work], tensors: Tensors) -> list[tuple[int, dist.Work]]:
        return [(peer, transfer([part], peer, tag)) for peer, part in tensors.items() if peer != rank and part.numel()]

    return start(group.recv, received) + start(group.send, sent)


def sum_rows(received: Tensor, output: Tensor) -> None:
    """Put the sum of the equal parts of ``received``, which lie in the order of ranks, into ``output``."""
    if output.numel():
        torch.sum(received.view(-1, output.numel()), dim=0, dtype=output.dtype, out=output.view(-1))


# --- how the ranks make a group together ------------------------------------------------------------------------------


def machine_id() -> str:
    """Return an id that differs between machines, and between network namespaces, which count as machines."""
    boot, namespaces = "", []
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(errors="replace").strip()
        namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return f"{socket.gethostname()} {boot} {namespaces}"


def find_machines(store: dist.Store, rank: int, size: int) -> list[list[int]]:
    """Return the ranks by machine, in ascending order. Collective: every rank. Blocks until all have called it."""
    store.set(f"machine/{rank}", machine_id())
    if rank == 0:
        by_id = grouped(range(size), lambda member: store.get(f"machine/{member}"))
        store.set("machines", json.dumps(list(by_id.values())))
    machines: list[list[int]] = json.loads(store.get("machines"))
    return machines


def create_group(options: Any, _: Any = None) -> Any:
    """Return the process group that c10d asks for: shared memory on one machine, a hierarchy on several, or Gloo.

    Collective: every rank of the new group. Blocks until all ranks have called it. All ranks decide the same: if one
    machine has no shared memory, none uses it.

    Args:
        options: c10d's ``_DistributedBackendOptions``.
    """
    leave_unrecorded("shm")
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    # A prefix, because the store belongs to the caller, who has other keys in it.
    store = PrefixStore("lockstep/shm", options.store)
    machines = find_machines(store, rank, size)
    ranks = next(ranks for ranks in machines if rank in ranks)
    inner = PrefixStore(f"machine{machines.index(ranks)}", store)
    segment, objection = None, ""
    # Gloo is all there is if each machine has one rank, and does everything if their numbers differ.
    if len(machines) == 1 or (len(machines) < size and len(set(map(len, machines))) == 1):
        segment, objection = share_memory(inner, ranks.index(rank), len(ranks))
        if len(machines) > 1:  # agree across machines, not only within one
            objection = agree(store, objection, size)
    if segment is None or objection:
        if segment is not None:
            segment.close_file()
        if objection and rank == 0 and size > 1:
            _log_once(f"this group uses Gloo instead of shm: {objection}.")
        return dist.ProcessGroupGloo(options.store, rank, size, timeout=timeout)
    inside = join_shm(segment, inner, ranks, options)
    if len(machines) == 1:
        return inside
    place = ranks.index(rank)
    between = _gloo_group(PrefixStore(f"place{place}", store), machines.index(ranks), len(machines), timeout)
    flat = _gloo_group(PrefixStore("flat", store), rank, size, timeout)
    return HierarchicalProcessGroup(
        options.store, rank, str(options.group_id), machines=machines, inside=inside, between=between, flat=flat
    )


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return group_of(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), store, rank, size, _CPU)
