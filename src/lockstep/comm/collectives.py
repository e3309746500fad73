"""The collective operations that the engines and ``fit`` need, on any process group. ``src`` is a rank in the group."""

import hashlib
import io
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter, is_not
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.futures import Future
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from lockstep.base import activity, torch_internals
from lockstep.base.accelerator import is_capturing
from lockstep.base.containers import grouped, in_chunks
from lockstep.comm.hierarchy import HierarchicalProcessGroup, start_exchange, sum_rows
from lockstep.comm.network import gloo_cause, listening, note_links, wait_for_call
from lockstep.comm.process import make_forks_safe
from lockstep.comm.shm.ops import CommonMemory, Pieces
from lockstep.comm.shm.process_group import CpuProcessGroup, ShmProcessGroup
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, is_of_signal_handler

# For the engines. Join, JoinHook and Joinable are torch's protocol for uneven inputs.
__all__ = ["CommonMemory", "Join", "JoinHook", "Joinable", "Pieces"]

Group = dist.ProcessGroup
AnyDevice = torch.device | str
# A collective under way. The caller keeps its tensors alive: not every backend does.
Work = dist.Work

GradBucketType = dist.GradBucket
BuiltinCommHookType = dist.BuiltinCommHookType

ReduceName = Literal["sum", "max", "min"]
_OPERATIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# As in torch's DistributedDataParallel. The buffer of a chunk needs memory in addition to the tensors.
_BROADCAST_CHUNK_BYTES = 250 * 2**20
# In c10d this means "the group's own timeout". Groups written in Python may require options and this argument.
NO_TIMEOUT = timedelta(0)
# Held while a collective is launched on a device, or is aborted: NCCL allows one thread at a time.
launching = threading.RLock()


def is_initialized() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def default_group() -> Group:
    """Return the default process group.

    Raises:
        ConfigurationError: There is none yet.
    """
    if not is_initialized():
        raise ConfigurationError(
            "Default process group has not been initialized, please make sure to call init_process_group.\n"
            "Start the script with `lockstep run`, and before this call lockstep.init(), or prepare() with the model."
        )
    # Also for groups that the script created itself: its data loaders may fork once there is a group.
    make_forks_safe()
    group = dist.group.WORLD
    assert group is not None
    return group


def group_or_default(group: Any) -> Group:
    """Return ``group``; if it is None, the default process group.

    Raises:
        ConfigurationError: This rank is not in it, or there is no default group yet.
    """
    if group is None:
        return default_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            f"Rank {dist.get_rank()} is not in the process_group: new_group() was called without this rank.\n"
            "Use the group only on its ranks, or give each rank a group that it is in."
        )
    return cast("Group", group)


def split_group(color: int, *, group: Group, device: torch.device) -> Group:
    """Return a new group of the ranks that passed the same ``color``. ``group`` is the default group.

    Collective: every rank. Blocks until all ranks have called it.
    """
    colors = all_gather_object(color, group=group, device=device)
    ranks = grouped(range(len(colors)), colors.__getitem__)
    return _noted(lambda: dist.new_subgroups_by_enumeration([ranks[key] for key in sorted(ranks)])[0])


def _noted(make: Callable[[], Any]) -> Group:
    """Return what ``make`` makes, with its connections noted for `cut_links`. Collective: every rank of that group."""
    before = listening()
    group: Group = make()
    if "gloo" in backend_name(group):
        store = dist.PrefixStore(f"lockstep/links/{group.group_name}", torch_internals.default_store())
        note_links(before, store, group.rank(), group.size())
    return group


def mesh_group(device_mesh: Any, module: torch.nn.Module) -> Group:
    """Return the group of a one-dimensional ``DeviceMesh``; prepare ``module`` if the mesh is part of a larger one.

    Raises:
        RuntimeError: The mesh has more than one dimension.
    """
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    # Tensor parallelism on the other dimensions: DTensor parameters.
    if torch_internals.root_mesh(device_mesh) != device_mesh:
        torch_internals.pre_dp_module_transform()(module)
    group: Group = device_mesh.get_group(mesh_dim=0)
    return group


def stock_comm_hooks() -> ModuleType:
    """Return torch's module of default communication hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks


def in_backward_hooks(parameter: torch.nn.Parameter) -> list[Any]:
    """Return the handles of the hooks that run an optimizer on this parameter as soon as it has a gradient."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    return list(param_to_optim_hook_handle_map.get(parameter, ()))


def is_native(group: Group) -> bool:
    """Return whether ``group`` is of c10d's own class or of ours; other groups written in Python may do anything."""
    return type(group) is dist.ProcessGroup or isinstance(group, CpuProcessGroup)


def reduces_on_its_own(group: Group, device: torch.device) -> bool:
    """Return whether something other than the ranks' cores sums tensors of ``device``, while ranks can compute."""
    return device.type != "cpu" or not isinstance(group, ShmProcessGroup)


def backend_name(group: Group) -> str:
    """Return the backend's name, such as ``gloo`` or ``nccl``; for shm what is used in fact: shm, Gloo or both."""
    if isinstance(group, CpuProcessGroup):
        return group.name()
    try:
        name = str(dist.get_backend(group))
        return "gloo" if name == "shm" else name
    except (ValueError, KeyError, RuntimeError):  # a group that c10d does not know
        return str(group.name())


def device_for(group: Group) -> torch.device:
    """Return the device for small messages of ``group``: the CPU if the group supports it, else the current device."""
    # A group written in Python may name no device types.
    types = [device.type for device in group._device_types] or ["cpu"]
    return torch.device("cpu") if "cpu" in types else torch.device(types[0], torch.accelerator.current_device_index())


def _real(tensor: Tensor) -> Tensor:
    """Return a view that backends without complex numbers can sum and move; the view of a flat tensor is flat."""
    if not tensor.is_complex():
        return tensor
    # A sum of complex numbers sums real and imaginary parts separately, so summing the pairs is the same.
    real = torch.view_as_real(tensor)
    return real.view(-1) if tensor.dim() == 1 else real


def takes_pieces(group: Group) -> bool:
    """Return whether ``group`` fills a CPU tensor with `Pieces` while it reduces it."""
    return isinstance(group, ShmProcessGroup)


def all_reduce_work(
    tensor: Tensor, *, group: Group, op: ReduceName = "sum", alone: bool = False, pieces: Pieces | None = None
) -> Work:
    """Start to replace ``tensor`` by its sum, maximum or minimum over all ranks.

    Collective: every rank, in the same order. Does not block, unless ``alone``.

    Args:
        tensor: Any shape, contiguous or sparse; same shape and dtype on every rank. Valid after a wait.
        group: The ranks that take part.
        op: What is computed, element by element.
        alone: Whether the caller waits at once and has nothing else to do: on shm it then does the work itself.
        pieces: What to fill the tensor with first, if `takes_pieces`. None: the tensor is already filled.
    """
    options = dist.AllreduceOptions()
    options.asyncOp = not (alone and tensor.is_cpu)
    # Here and below, the group's methods are called. The functions of torch.distributed refuse groups that c10d does
    # not know, such as groups written in Python.
    options.reduceOp = _OPERATIONS[op]
    # c10d's own groups do not accept ``pieces``.
    return _launch(tensor, group.allreduce, [_real(tensor)], options, **({} if pieces is None else {"pieces": pieces}))


def _launch(tensor: Tensor, method: Callable[..., Work], *args: Any, **kwargs: Any) -> Work:
    """Call a ``method`` of a group that communicates ``tensor``."""
    if tensor.is_cpu:  # it may block until other threads have communicated, too
        return method(*args, **kwargs)
    with launching:
        activity.now.has_captured |= is_capturing(tensor.device)
        return method(*args, **kwargs)


class Started:
    """Collectives under way, as one, with the methods of a future that the engines use.

    No future of torch's: that of Gloo orders no stream of a GPU, and from torch 2.15 on, the call that returns NCCL's
    makes the current stream wait. What orders the stream that uses the result is the ``wait`` of each work.

    Args:
        work: The first of them.
        tensor: What it communicates.
        group: The ranks that take part.

    Attributes:
        works: In the order of their start.
    """

    def __init__(self, work: Work, tensor: Tensor, group: Group) -> None:
        self.works = [work]
        self._device = tensor.device
        self._stream_waits = not tensor.is_cpu and not _is_gloo(group, tensor.device)

    def done(self) -> bool:
        """Return whether `wait` does not block the host."""
        return self._stream_waits or all(work.is_completed() for work in self.works)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` when all are complete; on a device at once, and its current stream waits for them."""
        if not self._stream_waits:
            self.works[-1].get_future().add_done_callback(callback)
            return
        with torch.Stream(self._device):
            self.wait()
            callback(self)

    def wait(self) -> None:
        """Block until all are complete (on CUDA: the current stream waits)."""
        for work in self.works:
            wait_for_call(work)


def started(work: Work, tensor: Tensor, group: Group) -> Future[Any] | Started:
    """Return what to wait for where ``tensor`` is used, which ``work`` communicates."""
    # Of groups that others wrote in Python, torch's class asks for the future; their works may return too early.
    return Started(work, tensor, group) if is_native(group) else work.get_future()


def all_reduce_together(tensors: Sequence[Tensor], *, group: Group) -> list[Work]:
    """Start to replace each of ``tensors`` by its sum over all ranks: one collective for each device and dtype.

    Collective: every rank, in the same order, with the same shapes and dtypes. Does not block.
    """
    # A group written in Python may lack this method, and Gloo's is for CPU tensors.
    if not is_native(group) or any(not tensor.is_cpu and _is_gloo(group, tensor.device) for tensor in tensors):
        return [all_reduce_work(tensor, group=group) for tensor in tensors]
    groups = grouped(map(_real, tensors), attrgetter("device", "dtype"))
    options = dist.AllreduceCoalescedOptions()
    return [_launch(part[0], group.allreduce_coalesced, part, options) for part in groups.values()]


def broadcast_async(tensor: Tensor, *, group: Group, src: int, alone: bool = False) -> Work:
    """Start to overwrite the contiguous ``tensor`` with that of rank ``src``. Collective: every rank."""
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = _member(src, group), not (alone and tensor.is_cpu)
    return _launch(tensor, group.broadcast, [_real(tensor)], options)


def _member(rank: int, group: Group) -> int:
    """Return ``rank``. Raises ConfigurationError if ``group`` does not have it: backends name no cause, or no rank."""
    if 0 <= rank < group.size():
        return rank
    raise ConfigurationError(f"Rank {group.rank()}: invalid root rank {rank}; pass 0 to {group.size() - 1}.")


def wait_for(handle: Any, operation: str = "a collective") -> Any:
    """Block until a work handle or a future is complete (on CUDA: the current stream waits); return its result.

    Args:
        handle: Of a collective under way. The timeout of its group applies.
        operation: The name in the watchdog and in errors, such as ``all_reduce of weights``.

    Raises:
        CollectiveError: The collective failed: another rank ended, or did not take part in time.
    """
    return _blocking(operation, lambda: handle)


def _blocking(operation: str, start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a collective and wait for it. Some groups run it already in the call that starts it."""
    started_s = time.perf_counter()
    try:
        with activity.waiting(operation):
            return wait_for_call(start(*args, **kwargs))
    except RuntimeError as error:  # errors of Gloo and NCCL name a socket, but no rank
        if isinstance(error, LockstepError) or is_of_signal_handler(error):
            raise
        rank = f"Rank {dist.get_rank()}" if is_initialized() else "This rank"
        raise CollectiveError(
            f"{rank}: {operation} failed: {gloo_cause(error)}\n"
            "Another rank ended, or did not take part in time: look at its output."
        ) from error
    finally:
        activity.now.waited_s += time.perf_counter() - started_s


def all_reduce(tensor: Tensor, *, group: Group, op: ReduceName = "sum", pieces: Pieces | None = None) -> None:
    """Replace ``tensor`` by its sum, maximum or minimum over all ranks, in place.

    Collective: every rank, in the same order. Blocks until complete (on CUDA: the current stream waits).
    """
    _blocking("all_reduce", all_reduce_work, tensor, group=group, op=op, alone=True, pieces=pieces)


def broadcast(tensor: Tensor, *, group: Group, src: int = 0, operation: str = "broadcast") -> None:
    """Overwrite ``tensor`` with that of rank ``src``, in place.

    Collective: every rank, in the same order. Blocks until complete. ``tensor`` is contiguous.
    """
    _blocking(operation, broadcast_async, tensor, group=group, src=src, alone=True)


def broadcast_coalesced(tensors: Sequence[Tensor], *, group: Group, src: int = 0) -> None:
    """Overwrite ``tensors`` with those of rank ``src``, in place. They are sent as bytes: all dtypes share a message.

    Collective: every rank, with tensors of the same shapes and dtypes in the same order. Blocks until complete.
    Version counters do not change: autograd may have saved these tensors, and they keep their meaning.
    """
    RepeatedBroadcast(group)(tensors, src=src)


class RepeatedBroadcast:
    """`broadcast_coalesced` for repeated calls with the same tensors: how they are packed is computed once."""

    def __init__(self, group: Group, operation: str = "broadcast") -> None:
        self._group, self._operation = group, operation
        self._tensors: list[Tensor] = []
        # Flat buffers, with lists of tensors and of the pieces for them.
        self._packs: list[tuple[Tensor, list[tuple[list[Tensor], list[Tensor]]]]] = []

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], *, src: int = 0) -> None:
        """Overwrite ``tensors`` with those of rank ``src``, in place.

        Collective: every rank, with tensors of the same shapes and dtypes in the same order. Blocks until complete.
        """
        if self._group.size() == 1 and is_native(self._group):
            return
        # Compared by identity: a module may have replaced a buffer by another one of the same shape.
        if len(tensors) != len(self._tensors) or any(map(is_not, tensors, self._tensors)):
            self._tensors = list(tensors)
            wide_first = sorted(tensors, key=lambda tensor: -tensor.itemsize)  # so each is aligned to its item size
            chunks = in_chunks(wide_first, attrgetter("device"), attrgetter("nbytes"), _BROADCAST_CHUNK_BYTES)
            self._packs = [_pack(chunk) for chunk in chunks]
        is_source = self._group.rank() == src
        for flat, lists in self._packs:
            for tensors, pieces in lists if is_source else ():
                torch_internals.foreach_copy_(pieces, tensors)
            broadcast(flat, group=self._group, src=src, operation=self._operation)
            for tensors, pieces in () if is_source else lists:
                # With a new version, autograd would refuse a backward through tensors that it saved before.
                versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
                with torch_internals.unsafe_preserve_version_counter(versioned):
                    torch_internals.foreach_copy_(tensors, pieces)


def _pack(tensors: list[Tensor]) -> tuple[Tensor, list[tuple[list[Tensor], list[Tensor]]]]:
    sizes_bytes = [tensor.nbytes for tensor in tensors]
    flat = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=tensors[0].device)
    pieces = flat.split(sizes_bytes)
    # One list for each kind: a copy of several dtypes, or between different strides, is a kernel for each tensor.
    kinds = [(tensor.dtype, tensor.is_contiguous()) for tensor in tensors]
    groups = grouped(range(len(tensors)), kinds.__getitem__).values()
    views = [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
    return flat, [([tensors[index] for index in places], [views[index] for index in places]) for places in groups]


def all_gather(tensor: Tensor, *, group: Group) -> Tensor:
    """Return every rank's ``tensor``, by rank, as the rows of one.

    Collective: every rank, in the same order, with the same shape and dtype. Blocks until complete.
    """
    rows = tensor.new_empty((group.size(), *tensor.shape))
    options = dist.distributed_c10d.AllgatherOptions()
    if tensor.is_cpu or not has_all_gather(group, tensor.device):
        start = partial(group.allgather, [list(rows)], [tensor], options)
    else:  # NCCL gathers into one tensor, and would copy from it to those of a list, with a kernel for each rank
        flats = rows.flatten(), tensor.flatten()
        start = partial(_launch, tensor, torch_internals.all_gather_single, group, *flats, options)
    _blocking("all_gather", start)
    return rows


def all_gather_object(value: Any, *, group: Group, device: AnyDevice = "cpu") -> list[Any]:
    """Return every rank's ``value``, by rank. Values travel as JSON: numbers, strings, lists and dicts.

    Collective: every rank, in the same order. Blocks until complete.

    Args:
        value: Any JSON value; tuples arrive as lists.
        group: The ranks that take part.
        device: Where the bytes lie while they travel: a CUDA device for NCCL.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    # All ranks send as many bytes as the longest value has: backends require equal sizes.
    lengths = all_gather(torch.tensor([data.numel()], device=device), group=group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    gathered = all_gather(padded, group=group)
    return [json.loads(part[:length].numpy().tobytes()) for part, length in zip(gathered.cpu(), lengths, strict=True)]


def all_gather_different(value: Any, *, group: Group, device: AnyDevice = "cpu") -> list[Any]:
    """Return every rank's ``value``, by rank; a single one if all are equal, in which case only digests are sent.

    Collective: every rank, in the same order. Blocks until complete. For values that grow with the model: those of
    many ranks together would be large.

    Args:
        value: See :func:`all_gather_object`.
        group: The ranks that take part.
        device: Where the bytes lie while they travel.
    """
    digest = int.from_bytes(hashlib.sha256(json.dumps(value).encode()).digest()[:7], "big")
    digests = all_gather(torch.tensor([digest], device=device), group=group).flatten().tolist()
    if len(set(digests)) == 1:  # all ranks see the same digests and take the same branch
        return [value]
    return all_gather_object(value, group=group, device=device)


def broadcast_object(value: Any, *, group: Group, src: int = 0, device: AnyDevice = "cpu") -> Any:
    """Return rank ``src``'s ``value`` on every rank; see :func:`all_gather_object` for what can travel.

    Collective: every rank, in the same order. Blocks until complete.
    """
    # A gather, because the other ranks do not know how much memory to allocate; for short values.
    return all_gather_object(value if group.rank() == _member(src, group) else None, group=group, device=device)[src]


def empty_buffer(numel: int, *, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """Return an uninitialized flat tensor in memory where ``group`` reduces and gathers it without copies.

    On shm all ranks map this memory; NCCL registers it, so that fewer of a GPU's processors reduce and gather it. With
    another backend, or if there is too little of it, ranks get ordinary memory. In each case the tensor behaves like
    any other, and its memory is freed with the last reference to it.

    Collective on shm: every rank, in the same order, with the same arguments. Blocks until all ranks have called it.

    Args:
        numel: Number of elements.
        dtype: Their dtype.
        device: The tensor's device.
        group: The ranks that exchange it.
    """
    # Zero bytes cannot be mapped. All ranks have the same numel, so all take the same branch.
    inside = group.inside if isinstance(group, HierarchicalProcessGroup) else group
    if device.type == "cpu" and isinstance(inside, ShmProcessGroup) and numel:
        return inside.shm_ops.empty_shared((numel,), dtype)
    registered = torch_internals.registered_memory(group, device) if device.type != "cpu" and is_native(group) else None
    if registered is not None and os.environ.get("DDP_DISABLE_COMM_MEM") != "1":  # torch's class does it only with "0"
        try:
            return registered(numel, dtype=dtype, device=device)
        except (
            RuntimeError
        ) as error:  # such as not enough memory: its blocks are larger than those of torch's allocator
            warnings.warn(f"A bucket is in memory that is not registered: {error}", stacklevel=2)
    return torch.empty(numel, dtype=dtype, device=device)


def common_memory(numel: int, *, dtype: torch.dtype, device: torch.device, group: Group) -> CommonMemory | None:
    """Return a flat tensor of which all ranks of ``group`` share one copy, or None where there is no such memory.

    Collective on shm: every rank, in the same order, with the same arguments. Blocks until all ranks have called it.
    """
    if device.type == "cpu" and isinstance(group, ShmProcessGroup) and group.size() > 1 and numel:
        return group.shm_ops.common_memory(numel, dtype)
    return None


# --- Messages between two ranks: unlike collectives, ranks may start them in different orders


def cpu_group(group: Group) -> Group:
    """Return ``group`` if it can send CPU tensors, else a group of the same ranks on Gloo.

    Collective: every rank of ``group``. If a group has to be created, blocks until all ranks have called it.
    """
    if torch.device("cpu") in group._device_types:
        return group
    ranks = dist.get_process_group_ranks(group)
    return _noted(lambda: dist.new_group(ranks, backend="gloo", use_local_synchronization=True))


def wait_for_transfer(work: Work, group: Group) -> None:
    """Block until a send or a receive is complete, at most for the group's timeout."""
    cpu = torch.device("cpu")
    has_gloo = cpu in group._device_types and _is_gloo(group, cpu)  # a group of NCCL's has nothing for the CPU
    # Gloo would use the timeout that the group was created with: for `init` that is the timeout of connecting.
    work.wait(torch_internals.timeout_of(torch_internals.backend_of(group, cpu)) if has_gloo else NO_TIMEOUT)


# --- Flat tensors of which each rank owns a slice; and gathering whole states


def has_reduce_scatter(group: Group, device: torch.device) -> bool:
    """Return whether a reduce-scatter costs ``group`` less than an all-reduce: not for Gloo on a GPU."""
    if isinstance(group, CpuProcessGroup):
        return True
    return is_native(group) and (device.type == "cpu" or not _is_gloo(group, device))


def has_all_gather(group: Group, device: torch.device) -> bool:
    """Return whether ``group`` can gather flat tensors of ``device``; for GPU tensors Gloo has only broadcast."""
    return device.type == "cpu" or has_reduce_scatter(group, device)


def sums_sparse_tensors(group: Group, device: torch.device) -> bool:
    """Return whether ``group`` can sum sparse tensors of ``device``: NCCL cannot."""
    return device.type == "cpu" or group.size() == 1 or not is_native(group) or _is_gloo(group, device)


def _is_gloo(group: Group, device: torch.device) -> bool:
    return type(group) is dist.ProcessGroup and "gloo" in torch_internals.backend_of(group, device).name().lower()


def all_to_all_async(
    output: Tensor, tensor: Tensor, *, output_sizes: Sequence[int], input_sizes: Sequence[int], group: Group
) -> Work | None:
    """Start to send a piece of ``tensor`` to each rank and to receive one from each.

    Collective: every rank, in the same order. Does not block, except with Gloo on a GPU.

    Args:
        output: One-dimensional, contiguous: the pieces received, in the order of ranks.
        tensor: One-dimensional, contiguous: the pieces to send, in the order of ranks.
        output_sizes: Number of elements that each rank sends to this one.
        input_sizes: Number of elements that this rank sends to each.
        group: The ranks that take part.

    Returns:
        The handle to wait for. None: the exchange is complete.
    """
    width = 2 if tensor.is_complex() else 1
    received_sizes, sent_sizes = ([size * width for size in sizes] for sizes in (output_sizes, input_sizes))
    options = dist.AllToAllOptions()
    if not tensor.is_cpu and _is_gloo(group, tensor.device):  # Gloo's all-to-all takes CPU tensors only
        received, sent = torch.empty_like(output, device="cpu"), tensor.cpu()
        flats = _real(received), _real(sent)
        _blocking("all_to_all", lambda: group.alltoall_base(*flats, received_sizes, sent_sizes, options))
        output.copy_(received)
        return None
    if _is_gloo(group, tensor.device):
        return _Exchange(_real(tensor).split(sent_sizes), _real(output).split(received_sizes), group)
    return _launch(tensor, group.alltoall_base, _real(output), _real(tensor), received_sizes, sent_sizes, options)


class _Exchange(Work):
    """The handle of a `start_exchange`. The piece that a rank has for itself is copied.

    Args:
        sent, received: By rank, contiguous, on the CPU.
        group: The ranks, on Gloo.
        result: Called in `wait` when all transfers are complete.
    """

    def __init__(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: Group, result: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__()
        rank = group.rank()
        if received[rank].data_ptr() != sent[rank].data_ptr():
            received[rank].copy_(sent[rank])
        rows = dict(enumerate(sent)), dict(enumerate(received))
        self._works, self._group, self._result = start_exchange(group, *rows, rank), group, result
        self._tensors = sent, received  # kept alive until then
        self._future: Future[None] = Future()

    def get_future(self) -> Future[None]:
        """Return a future that is done after `wait`, as nothing else notices that the exchange is complete."""
        return self._future

    def is_completed(self) -> bool:
        """Return whether all transfers are complete."""
        return all(work.is_completed() for _, work in self._works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the exchange is complete, at most for the group's timeout."""
        works, self._works = self._works, []  # one that has failed is not waited for again
        for _, work in works:
            wait_for_transfer(work, self._group)
        result, self._result = self._result, lambda: None
        result()
        if not self._future.done():
            self._future.set_result(None)
        return True


def reduce_scatter_slices(flat: Tensor, *, group: Group, alone: bool = False, pieces: Pieces | None = None) -> Work:
    """Start to replace this rank's slice of ``flat`` by its sum over all ranks; the other slices become arbitrary.

    Collective: every rank, in the same order. Does not block.

    Args:
        flat: One-dimensional, contiguous, its size a multiple of the number of ranks; the same on every rank.
        group: The ranks that take part; rank ``r`` owns slice ``r``.
        alone: As in `all_reduce_work`.
        pieces: As in `all_reduce_work`. Elements beyond the end of ``flat`` are copied to the memory after it.
    """
    if flat.is_cpu and _is_gloo(group, flat.device):  # Gloo's own reduce-scatter is an all-reduce
        own_slice, received = _real(_own_slice(flat, group)), torch.empty_like(_real(flat))
        slices, places = (flats.view(group.size(), own_slice.numel()).unbind() for flats in (_real(flat), received))
        return _Exchange(slices, places, group, lambda: sum_rows(received, own_slice))
    options = dist.ReduceScatterOptions()
    options.asyncOp = not (alone and flat.is_cpu)
    extra = {} if pieces is None else {"pieces": pieces}
    arguments = group, _real(_own_slice(flat, group)), _real(flat), options
    return _launch(flat, torch_internals.reduce_scatter_single, *arguments, **extra)


def all_gather_flat(output: Tensor, tensor: Tensor, *, group: Group, alone: bool = False) -> Work:
    """Start to put every rank's ``tensor`` into ``output``, in the order of ranks.

    Collective: every rank, in the same order, with the same shape and dtype. Does not block.

    Args:
        output: One-dimensional, contiguous, as many elements as all tensors together; ``tensor`` may be a part of it.
        tensor: One-dimensional, contiguous.
        group: The ranks that take part.
        alone: As in `all_reduce_work`.
    """
    if tensor.is_cpu and _is_gloo(group, tensor.device):
        sent = _real(tensor)
        return _Exchange([sent] * group.size(), _real(output).view(group.size(), sent.numel()).unbind(), group)
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = not (alone and tensor.is_cpu)
    return _launch(tensor, torch_internals.all_gather_single, group, _real(output), _real(tensor), options)


def all_gather_slices(flat: Tensor, *, group: Group, alone: bool = False) -> Work:
    """Start to fill every slice of ``flat`` with the slice of the rank that owns it.

    Collective: every rank, in the same order. Does not block. See `reduce_scatter_slices`.
    """
    return all_gather_flat(flat, _own_slice(flat, group), group=group, alone=alone)


def _own_slice(flat: Tensor, group: Group) -> Tensor:
    size = flat.numel() // group.size()
    return flat[group.rank() * size : (group.rank() + 1) * size]


def gather_states(state: Any, *, group: Group, device: torch.device, to: int | None = None) -> list[Any]:
    """Return every rank's ``state``, by rank and on the CPU, to rank ``to`` (None: to all); other ranks get none.

    Collective: every rank, in the same order. Blocks until complete.

    Args:
        state: Tensors, numbers and strings, in lists and dicts; see `unpacked_state`.
        group: The ranks that take part.
        device: Where the bytes lie while they travel: a CUDA device for NCCL.
        to: The rank that gets them.
    """
    keeps = to is None or _member(to, group) == group.rank()
    packed = packed_state(state)
    sizes = all_gather(torch.tensor([packed.numel()], device=device), group=group).flatten().tolist()
    states = []
    for rank, size in enumerate(sizes):  # one by one: only a rank that keeps them needs memory for more than one
        data = packed.to(device) if rank == group.rank() else torch.empty(size, dtype=torch.uint8, device=device)
        broadcast(data, group=group, src=rank)
        if keeps:
            states.append(unpacked_state(data))
    return states


# What numpy's arrays and numbers are made again with; a scheduler's learning rate is often such a number.
_OF_NUMPY: list[Any] = [np.ndarray, np.dtype, np.float64(0).__reduce__()[0], np.empty(0).__reduce__()[0]]
_OF_NUMPY += [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]


def packed_state(state: Any) -> Tensor:
    """Return ``state`` as bytes for `unpacked_state`, on this rank or another one."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpacked_state(data: Tensor, kinds: Sequence[type] = ()) -> Any:
    """Return the state of `packed_state`, on the CPU.

    Args:
        data: From any rank.
        kinds: Further classes that may be in it: plain data, which runs no code when it is made again.

    Raises:
        ValueError: It holds more than tensors, numbers, strings and arrays of numbers, in lists, tuples, sets, dicts.
    """
    file = io.BytesIO(data.cpu().numpy().tobytes())
    with safe_globals([*_OF_NUMPY, *kinds]):
        try:
            # Data from the network must not run code here.
            return torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            file.seek(0)
            names = ", ".join(sorted(get_unsafe_globals_in_checkpoint(file))) or "an array of objects"
            raise ValueError(f"It holds {names}.") from error
