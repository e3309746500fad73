"""The collectives of c10d on a shared segment, for tensors on the CPU."""

import ctypes
import math
import mmap
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.base import activity
from lockstep.base.torch_internals import indices_of, nnz, values_of
from lockstep.comm.shm import communicator as c
from lockstep.comm.shm.communicator import Kind
from lockstep.comm.shm.segment import Segment, share_segment
from lockstep.comm.shm.work import ENDED, OpQueue, ShmWork
from lockstep.errors import CollectiveError, ConfigurationError

# Calls a function of the C library with the group, the arguments and the timeout, and raises an error if it fails.
NativeCall = Callable[..., None]
Action = Callable[[NativeCall], None]
# Number of an allocation, offset in a rank's share of it, and where the ranks' shares lie.
BufferLocation = tuple[int, int, ctypes.Array[ctypes.c_void_p] | None]
PRIVATE_MEMORY: BufferLocation = (-1, 0, None)
_Flag = ctypes.Array[ctypes.c_int32]
# Addresses and sizes of tensors, how many, a factor, and where a flag is set.
_Pieces = tuple[ctypes.Array[ctypes.c_void_p] | None, ctypes.Array[ctypes.c_uint64] | None, int, float, _Flag | None]
_NO_PIECES: _Pieces = (None, None, 0, 1.0, None)
# How long a call waits for late ranks before it leaves that to a thread.
_PATIENCE_S = 0.005
Tensors = Sequence[Tensor]
_Row = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]


class Pieces(NamedTuple):
    """The contents of a flat tensor before a reduction: ``tensors``, back to back, times ``factor``.

    The call copies them into the flat tensor. It copies the slice that this rank reduces only while reducing it, which
    saves one pass over memory. They are contiguous, on the CPU, and of the flat tensor's dtype, float32 or float64.
    Without tensors, the flat tensor is already filled. A call with pieces begins in the thread that makes it, see
    `ShmOps.begin_at_once`. Afterwards ``nonfinite[0]`` is 1 if an element is NaN or infinite; None: not checked.
    """

    tensors: Tensors = ()
    factor: float = 1.0
    nonfinite: _Flag | None = None

    def for_c(self) -> _Pieces:
        """Return them for C; the tensors must outlive the call."""
        count = len(self.tensors)
        # Python arrays, because ctypes arrays take several times as long to fill.
        addresses, sizes = (array("Q", map(ask, self.tensors)) for ask in (Tensor.data_ptr, Tensor.numel))
        pointers = (ctypes.c_void_p * count).from_buffer(addresses)
        return pointers, (ctypes.c_uint64 * count).from_buffer(sizes), count, self.factor, self.nonfinite


class _Allocation(NamedTuple):
    """Memory with a share for each rank. This rank's share lies from ``start`` to ``end`` in its address space."""

    number: int
    start: int
    end: int
    parts: ctypes.Array[ctypes.c_void_p]
    memory: weakref.ref[mmap.mmap]


class SharedBuffers:
    """The allocations of one group that are still in use in this process: tensors in them are reduced in place."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._allocations: list[_Allocation] = []
        self._num_made = 0

    def add(self, segment: Segment, share_bytes: int) -> None:
        """Add an allocation. All ranks allocate in the same order, so they give it the same number."""
        parts = (ctypes.c_void_p * self._size)(*(segment.address + i * share_bytes for i in range(self._size)))
        start = segment.address + self._rank * share_bytes
        # A weak reference: the mapping must be freed with the last tensor in it.
        memory = weakref.ref(segment.memory)
        self._allocations = [allocation for allocation in self._allocations if allocation.memory() is not None]
        self._allocations.append(_Allocation(self._num_made, start, start + share_bytes, parts, memory))
        self._num_made += 1

    def find(self, tensor: Tensor) -> BufferLocation:
        """Return where a contiguous tensor lies."""
        address = tensor.data_ptr()
        for allocation in self._allocations:
            if allocation.start <= address < allocation.end and allocation.memory() is not None:
                return allocation.number, address - allocation.start, allocation.parts
        return PRIVATE_MEMORY


class CommonMemory:
    """A flat tensor of which the ranks of a machine share one copy. Each rank may still write to it privately.

    [Note: one copy for all ranks]
    Each rank maps the same memory twice. A rank reads it through ``own``. Its first write to a page of ``own`` gives it
    a private copy of that page, which the other ranks do not see (copy-on-write). A write through ``shared`` is visible
    in the ``own`` of all ranks, except in their private pages. The kernel reports which pages are private
    (/proc/self/pagemap), so no write of a script is missed, whatever code made it. `publish` copies this rank's part of
    them to ``shared``, and `forget_changes` drops the private pages. The caller orders the writes of the ranks.
    """

    def __init__(self, segment: Segment, numel: int, dtype: torch.dtype) -> None:
        self._segment = segment
        self._mapping = mmap.mmap(segment.fd, len(segment.memory), access=mmap.ACCESS_COPY)
        self.own = torch.frombuffer(self._mapping, dtype=dtype, count=numel)
        self.shared = torch.frombuffer(segment.memory, dtype=dtype, count=numel)
        self._changed: list[tuple[int, int]] = []  # ranges of bytes

    def publish(self, start: int, stop: int) -> None:
        """Copy this rank's changes to the elements ``start`` to ``stop`` to the memory that all ranks read."""
        self._changed = self._own_pages()
        width = self.own.itemsize
        for first, end in self._changed:
            part = slice(max(start, first // width), min(stop, end // width))
            if part.start < part.stop:
                self.shared[part] = self.own[part]

    def forget_changes(self) -> None:
        """From now on read what all ranks share, instead of the changes that this rank had before `publish`."""
        for first, end in self._changed:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)
        self._changed = []

    def _own_pages(self) -> list[tuple[int, int]]:
        """Return the private pages of this rank, as ranges of bytes."""
        entries = torch.empty(len(self._mapping) // mmap.PAGESIZE, dtype=torch.int64, device="cpu")
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(self.own.data_ptr() // mmap.PAGESIZE * 8)
            file.readinto(entries.numpy().data)
        # The upper bits say whether a page is in memory, is swapped out, or belongs to a file, and so is shared.
        kinds = (entries >> 61) & 7
        pages = ((kinds != 0) & (kinds & 1 == 0)).nonzero().view(-1)
        if not len(pages):
            return []
        is_gap = (pages.diff() > 1).nonzero().view(-1).tolist()
        firsts, lasts = pages[[0, *(gap + 1 for gap in is_gap)]], pages[[*is_gap, len(pages) - 1]]
        return list(zip((firsts * mmap.PAGESIZE).tolist(), ((lasts + 1) * mmap.PAGESIZE).tolist(), strict=True))

    def objection(self) -> str:
        """Return why this memory cannot be used here; empty if it can."""
        end, common = len(self._mapping), self._segment.memory[-1]
        try:
            self._mapping[-1] = 1 - common  # a byte that is still zero, outside the token
            self.publish(0, 0)
            is_seen = self._changed == [(end - mmap.PAGESIZE, end)] and self._segment.memory[-1] == common
            self.forget_changes()
            works = is_seen and self._mapping[-1] == common
            return "" if works else "the kernel does not report which pages belong to this rank"
        except OSError as error:
            return str(error)


def _for_c(pieces: Pieces | None) -> _Pieces:
    return _NO_PIECES if pieces is None else pieces.for_c()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor in the layout that the C library reads; a copy unless it has that layout already."""
    # torch applies conjugation and negation lazily, by flags of the tensor object that are not in its memory.
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copy_back(data: Tensor, tensor: Tensor) -> None:
    """Write what `contiguous` returned back into the tensor, if it was a copy."""
    if data.data_ptr() != tensor.data_ptr() or data.stride() != tensor.stride():
        # The elements of an expanded tensor share memory, which torch writes to only through one of them.
        elements = tuple(slice(1 if step == 0 else None) for step in tensor.stride())
        tensor.detach()[elements].copy_(data[elements])


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses for C; the tensors must outlive the call."""
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def _byte_sizes(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(tensors))(*(0 if tensor is None else tensor.nbytes for tensor in tensors))


def _reduce_scatter_arguments(
    inputs: Tensors, output: Tensor, op_code: int, location: BufferLocation, pieces: Pieces | None = None
) -> Sequence[Any]:
    """Return the arguments of C's ``lockstep_reduce_scatter`` after the group and before the phase."""
    counts = (ctypes.c_uint64 * len(inputs))(*map(Tensor.numel, inputs))
    dtype_code = c.DTYPE_CODES[output.dtype]
    return _pointers(inputs), counts, output.data_ptr(), dtype_code, op_code, *location, *_for_c(pieces)


# How c10d combines several tensors of one rank, by the code of the reduction.
_LOCAL_REDUCTIONS = ("add", "add", "mul", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor")


class ShmOps:
    """The collectives that one rank calls on its group, one after the other. Each returns a work handle at once.

    [Note: life of a call]
    A method checks its arguments, so that a wrong call raises where it was made, and queues the rest as an action. See
    work.py for which thread runs it. The action converts the tensors for the C library (contiguous, as addresses and
    sizes) and calls one of its three functions: all_reduce, reduce_scatter, or exchange, which moves any tensor from
    any rank to any other. Tensors that had to be copied are copied back at the end.
    """

    def __init__(self, comm: c.Communicator, name: str) -> None:
        self.comm, self.size, self.rank = comm, comm.size, comm.rank
        self.buffers = SharedBuffers(comm.rank, comm.size)
        self.queue = OpQueue(f"lockstep-shm-{name}")
        self._nothing: list[Tensor | None] = [None] * self.size

    def submit(self, name: str, action: Action, outputs: Sequence[Any], opts: Any = None) -> ShmWork:
        """Queue ``action``, which calls the C library through its argument; return the handle."""
        self.comm.ensure_usable(name)
        call = partial(self.comm.call, name, self._timeout_s(opts))

        def guarded() -> None:
            try:
                action(call)
            except Exception as error:
                # The others are in this collective, or will be: without this they would wait until the timeout.
                self.comm.give_up(CollectiveError(f"{name} failed: {error}"))
                raise

        work = ShmWork(name, self.queue, guarded, outputs)
        self.queue.add(work, is_async=getattr(opts, "asyncOp", True))
        return work

    def _timeout_s(self, opts: Any) -> float:
        """Return the timeout in the options of a call, or the group's."""
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        return seconds if seconds > 0 else self.comm.timeout_s

    def begin_at_once(
        self, name: str, function: Callable[..., int], arguments: Sequence[Any], tensors: Sequence[Any], opts: Any
    ) -> ShmWork | None:
        """Make a call in this thread, if nothing is queued; else return ``None``.

        Ranks with the same work reach a call at nearly the same time. A short wait for them then costs less than a
        thread that competes with backward for a core. If a rank is late, because its data or its graph differs, the
        rest of the call is queued, and this rank goes on. So two ranks never wait for each other in different calls.

        Args:
            name: For messages.
            function: Of the C library, with `WHOLE`, `BEGIN` or `REST` as the argument before the timeout.
            arguments: The arguments before that one.
            tensors: What has to stay alive until the end.
            opts: c10d's options.
        """
        # Calls run in the order in which they were made, so queued calls come first.
        if not self.queue.take_turn():
            return None
        call = partial(self.comm.call, name, self._timeout_s(opts), function, *arguments)
        try:
            with activity.waiting(name):
                if not getattr(opts, "asyncOp", True):
                    call(c.WHOLE)
                    return ENDED
                call(c.BEGIN)
                waits_from_s = time.perf_counter()
                have_all_begun = self.comm.have_all_begun(name, _PATIENCE_S)
                activity.now.waited_s += time.perf_counter() - waits_from_s  # this time is not work of this rank
                if have_all_begun:
                    call(c.REST)
                    return ENDED
            work = ShmWork(name, self.queue, partial(call, c.REST), tensors)
            self.queue.add(work, is_async=True)
            return work
        finally:
            self.queue.end_turn()

    # --- Reductions

    def all_reduce_at_once(self, tensor: Tensor, opts: Any, pieces: Pieces | None = None) -> ShmWork | None:
        """Begin to reduce in this thread, if nothing is queued and the tensor needs no copy; else return ``None``.

        Does the same as `allreduce` with less Python code, which takes most of the time for few bytes.
        """
        if tensor.dtype not in c.DTYPE_CODES or not tensor.is_contiguous() or tensor.is_neg():
            return None
        op_code = c.reduction_code(c.operation_of(opts), tensor.dtype)
        arguments = self._all_reduce_arguments(tensor, op_code, pieces)
        return self.begin_at_once("all_reduce", self.comm.native.lockstep_all_reduce, arguments, (tensor, pieces), opts)

    def _all_reduce_arguments(self, data: Tensor, op_code: int, pieces: Pieces | None, root: int = -1) -> Sequence[Any]:
        """Return the arguments of C's ``lockstep_all_reduce`` after the group and before the phase."""
        dtype_code, location = c.DTYPE_CODES[data.dtype], self.buffers.find(data)
        return data.data_ptr(), data.numel(), dtype_code, op_code, root, *location, *_for_c(pieces)

    def allreduce(self, tensors: Tensors, opts: Any = None, pieces: Pieces | None = None) -> ShmWork:
        """Replace each tensor by the reduction of all of them over all ranks. Collective: every rank.

        ``pieces``: what to fill the tensor with first; then there is only one, and it is contiguous.
        """
        run = self._reduction(tensors[:1], opts, pieces=pieces)

        def action(call: NativeCall) -> None:
            if len(tensors) > 1:
                op_code = c.reduction_code(c.operation_of(opts), tensors[0].dtype)
                tensors[0].copy_(reduce(getattr(torch, _LOCAL_REDUCTIONS[op_code]), tensors))
            run(call)
            for other in tensors[1:]:
                other.copy_(tensors[0])

        return self.submit("all_reduce", action, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        """Replace each tensor by its reduction over all ranks. Collective: every rank."""
        return self.submit("all_reduce", self._reduction(tensors, opts), tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Replace rank ``opts.rootRank``'s tensors by the reduction over all ranks. Collective: every rank."""
        return self.submit("reduce", self._reduction(tensors, opts, root=opts.rootRank), tensors, opts)

    def _reduction(self, tensors: Tensors, opts: Any, *, root: int = -1, pieces: Pieces | None = None) -> Action:
        """Return what reduces each tensor."""
        op = c.operation_of(opts)
        op_codes = [c.reduction_code(op, tensor.dtype) for tensor in tensors]
        if tensors[0].is_sparse:
            return partial(self._sum_sparse, tensors[0])

        def action(call: NativeCall) -> None:
            # Copied now, not when it was called: this call may read the result of the call before.
            staged = [contiguous(tensor) for tensor in tensors]
            # One memory may be in the list twice: each is the reduction of what was there before the call.
            if len({tensor.untyped_storage().data_ptr() for tensor in staged}) < len(staged):
                staged = [tensor.clone() for tensor in staged]
            for data, op_code in zip(map(c.as_numbers, staged), op_codes, strict=True):
                arguments = self._all_reduce_arguments(data, op_code, pieces, root)
                call(self.comm.native.lockstep_all_reduce, *arguments, c.WHOLE)
            for data, tensor in zip(staged, tensors if root in (-1, self.rank) else (), strict=False):
                copy_back(data, tensor)

        return action

    def _sum_sparse(self, tensor: Tensor, call: NativeCall) -> None:
        """Replace a sparse tensor by its sum over all ranks: gather all indices and values, and add them up."""
        # Each rank has different rows of an embedding, and a different number of them.
        own_sparse = tensor.detach().coalesce()
        count = torch.tensor([nnz(own_sparse)], device="cpu")
        lengths = [int(length) for length in self._gather(call, count, [1] * self.size)]
        indices = self._gather(call, indices_of(own_sparse).t().contiguous(), lengths)
        values = self._gather(call, values_of(own_sparse).contiguous(), lengths)
        total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    def _gather(self, call: NativeCall, own_rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        outputs = [own_rows.new_empty((length, *own_rows.shape[1:])) for length in lengths]
        self._exchange(call, Kind.ALL_GATHER, [own_rows] * self.size, outputs, same=True)
        return outputs

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> ShmWork:
        """Fill ``outputs[i]`` with the reduction of every rank's ``inputs[i][this rank]``. Collective: every rank."""
        return self._reduce_scatter(outputs, lambda i: ([contiguous(part) for part in inputs[i]], PRIVATE_MEMORY), opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Fill each output with this rank's part of the reduced input. Collective: every rank."""
        return self._reduce_scatter(outputs, lambda i: self._cut(contiguous(inputs[i]), own_part=outputs[i]), opts)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, pieces: Pieces | None = None
    ) -> ShmWork:
        """Fill ``output`` with this rank's part of the reduced ``tensor``. Collective: every rank.

        With ``pieces``, which fill ``tensor`` first, ``tensor`` is contiguous and ``output`` is a part of it.
        """
        if pieces is None:
            return self.reduce_scatter_single_coalesced([output], [tensor], opts)
        parts, location = self._cut(tensor, own_part=output)
        op_code = c.reduction_code(c.operation_of(opts), output.dtype)
        arguments = _reduce_scatter_arguments(parts, output, op_code, location, pieces)
        function, tensors = self.comm.native.lockstep_reduce_scatter, (tensor, pieces)
        work = self.begin_at_once("reduce_scatter", function, arguments, tensors, opts)
        return work or self.submit("reduce_scatter", lambda call: call(function, *arguments, c.WHOLE), tensors, opts)

    def _reduce_scatter(
        self, outputs: Tensors, parts_of: Callable[[int], tuple[list[Tensor], BufferLocation]], opts: Any
    ) -> ShmWork:
        """Queue a reduce-scatter for each output; ``parts_of`` gives its contiguous inputs, and where they lie."""
        op = c.operation_of(opts)
        op_codes = [c.reduction_code(op, output.dtype) for output in outputs]

        def action(call: NativeCall) -> None:
            for index, output in enumerate(outputs):
                parts, location = parts_of(index)
                staged = contiguous(output)
                inputs, target = [c.as_numbers(part) for part in parts], c.as_numbers(staged)
                arguments = _reduce_scatter_arguments(inputs, target, op_codes[index], location)
                call(self.comm.native.lockstep_reduce_scatter, *arguments, c.WHOLE)
                copy_back(staged, output)

        return self.submit("reduce_scatter", action, outputs, opts)

    def _cut(self, flat: Tensor, *, own_part: Tensor) -> tuple[list[Tensor], BufferLocation]:
        """Return a contiguous tensor's piece for each rank; and its location, if ``own_part`` is this rank's piece."""
        parts = list(flat.view(-1).split([own_part.numel()] * self.size))
        # Only in this case nothing needs to be copied.
        in_place = parts[self.rank].data_ptr() == own_part.data_ptr()
        return parts, self.buffers.find(flat) if in_place else PRIVATE_MEMORY

    # --- Data movement

    def _exchange(
        self,
        call: NativeCall,
        kind: int,
        sends: Sequence[Tensor | None],
        receives: Sequence[Tensor | None],
        *,
        root: int = -1,
        same: bool = False,
        location: BufferLocation = PRIVATE_MEMORY,
    ) -> None:
        """Exchange tensors, in the thread that has the turn; with ``same``, each rank sends one tensor.

        ``location`` is where the received tensors lie, if the one that this rank sends is already in its place there.
        """
        first = next((tensor for tensor in (*sends, *receives) if tensor is not None), None)
        if first is not None:
            # The library compares kinds, so ranks that send different dtypes get an error instead of wrong bits.
            kind += c.EXCHANGED_DTYPE * (c.ALL_DTYPE_CODES[first.dtype] + 1)
        # By identity: a tensor that goes to all ranks appears many times, and should be copied at most once.
        staged = {id(tensor): contiguous(tensor) for tensor in (*sends, *receives) if tensor is not None}
        sources, targets = ([staged.get(id(tensor)) for tensor in row] for row in (sends, receives))
        sent, received = (_pointers(sources), _byte_sizes(sources)), (_pointers(targets), _byte_sizes(targets))
        call(self.comm.native.lockstep_exchange, kind, root, int(same), *sent, *received, *location)
        for tensor in receives:
            if tensor is not None:
                copy_back(staged[id(tensor)], tensor)

    def _post(
        self, kind: Kind, rows: Sequence[_Row], outputs: Sequence[Any], opts: Any, *, root: int = -1, same: bool = False
    ) -> ShmWork:
        """Queue an exchange for each row: what this rank sends to each rank, and what it receives from each."""

        def action(call: NativeCall) -> None:
            for sends, receives in rows:
                self._exchange(call, kind, sends, receives, root=root, same=same)

        return self.submit(kind.name.lower(), action, outputs, opts)

    def _only(self, tensor: Tensor, rank: int) -> list[Tensor | None]:
        """Return the row of an exchange with one rank only."""
        return [tensor if other == rank else None for other in range(self.size)]

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Overwrite all tensors with number ``opts.rootTensor`` of rank ``opts.rootRank``. Collective: every rank."""
        root, sent = opts.rootRank, tensors[opts.rootTensor]
        return self._post(
            Kind.BROADCAST, [self._from_root(sent, root, out) for out in tensors], tensors, opts, root=root, same=True
        )

    def _from_root(self, sent: Tensor, root: int, received: Tensor) -> _Row:
        """Return what a broadcast sends and receives here; the root may receive, too."""
        if self.rank != root:
            return self._nothing, self._only(received, root)
        targets = self._nothing if received is sent else self._only(received, root)
        return [sent if target is not None or rank != root else None for rank, target in enumerate(targets)], targets

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Fill ``outputs[i]`` with every rank's ``inputs[i]``. Collective: every rank."""
        # With several inputs, c10d fills each row with all of them, those of one rank side by side.
        count = len(inputs)
        rows = [([inputs[i]] * self.size, row[i::count]) for row in outputs for i in range(count)]
        return self._post(Kind.ALL_GATHER, rows, outputs[0] if count == 1 else outputs, opts, same=True)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Fill ``outputs[r][i]`` with ``inputs[i]`` of rank r. Collective: every rank."""
        rows = [([tensor] * self.size, row) for tensor, row in zip(inputs, zip(*outputs, strict=True), strict=True)]
        return self._post(Kind.ALL_GATHER, rows, outputs, opts, same=True)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Fill each output with every rank's input, in the order of ranks. Collective: every rank."""
        size = self.size

        def action(call: NativeCall) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = contiguous(output)
                parts, location = self._cut(flat, own_part=tensor)
                self._exchange(call, Kind.ALL_GATHER, [tensor] * size, parts, same=True, location=location)
                copy_back(flat, output)

        return self.submit("all_gather", action, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Fill ``output`` with every rank's ``tensor``, in the order of ranks. Collective: every rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Send ``inputs[r]`` to rank r and fill ``outputs[r]`` from it. Collective: every rank."""
        return self._post(Kind.ALL_TO_ALL, [(inputs, outputs)], outputs, opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> ShmWork:
        """Send parts of ``tensor``, cut along its first dimension, and fill ``output``. Collective: every rank."""
        sends, receives = self._split(tensor, input_splits), self._split(output, output_splits)
        return self._post(Kind.ALL_TO_ALL, [(sends, receives)], [output], opts)

    def _split(self, tensor: Tensor, splits: Sequence[int]) -> Tensors:
        """Return each rank's part of ``tensor``, which is cut by rows."""
        rows = torch.atleast_1d(tensor)
        if not splits and len(rows) % self.size == 0:
            splits = [len(rows) // self.size] * self.size
        if len(splits) != self.size or sum(splits) != len(rows):
            raise ConfigurationError(
                f"all_to_all_single: the splits {list(splits)} do not cut {len(rows)} rows into {self.size} parts.\n"
                "Without splits, the number of rows must be a multiple of the number of ranks."
            )
        parts: Tensors = rows.split(list(splits))
        return parts

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> ShmWork:
        """Fill rank ``opts.rootRank``'s ``outputs[0]`` with every rank's input. Collective: every rank."""
        root = opts.rootRank
        targets = list(outputs[0]) if self.rank == root else self._nothing
        return self._post(Kind.GATHER, [(self._only(inputs[0], root), targets)], targets, opts, root=root, same=True)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> ShmWork:
        """Fill ``outputs[0]`` with rank ``opts.rootRank``'s ``inputs[0][this rank]``. Collective: every rank."""
        root = opts.rootRank
        sources = inputs[0] if self.rank == root else self._nothing
        return self._post(Kind.SCATTER, [(sources, self._only(outputs[0], root))], outputs, opts, root=root)

    def barrier(self, opts: Any = None) -> ShmWork:
        """Wait for all ranks. Collective: every rank."""
        return self._post(Kind.BARRIER, [(self._nothing, self._nothing)], [], opts)

    # --- Memory that all ranks map

    def empty_shared(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in memory that all ranks map, or in ordinary memory on all ranks; see buffers.

        Collective: every rank, with the same shape and dtype. Blocks until all ranks have called it.
        """
        tensors: list[Tensor] = []
        self.submit("empty_shared", lambda call: tensors.append(self._allocate(call, sizes, dtype)), tensors).wait()
        return tensors[0]

    def _allocate(self, call: NativeCall, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        share_bytes = _whole_pages(math.prod(sizes) * dtype.itemsize)
        segment = self._share(call, share_bytes * self.size)
        if segment is None:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        segment.close_file()  # the mapping stays
        # A share for each rank, in the order of ranks: each rank has its own tensor, which the others can read.
        self.buffers.add(segment, share_bytes)
        count, offset = math.prod(sizes), self.rank * share_bytes
        return torch.frombuffer(segment.memory, dtype=dtype, count=count, offset=offset).view(sizes)

    def common_memory(self, numel: int, dtype: torch.dtype) -> CommonMemory | None:
        """Return uninitialized memory of which all ranks share one copy; None on all ranks if it is not available.

        Collective: every rank, with the same arguments. Blocks until all ranks have called it.
        """
        memories: list[CommonMemory | None] = []

        def make(call: NativeCall) -> None:
            segment = self._share(call, _whole_pages(numel * dtype.itemsize))
            if segment is not None:
                memory = CommonMemory(segment, numel, dtype)
                segment.close_file()
                memories.append(None if self._object(call, memory.objection()) else memory)

        self.submit("common_memory", make, []).wait()
        return memories[0] if memories else None

    def _share(self, call: NativeCall, num_bytes: int) -> Segment | None:
        """Return memory that all ranks have mapped; None if a rank has no room."""

        def broadcast(offer: bytes) -> bytes:
            data = torch.frombuffer(bytearray(offer), dtype=torch.uint8)
            sends, receives = self._from_root(data, 0, data)
            self._exchange(call, Kind.EMPTY_SHARED, sends, receives, root=0, same=True)
            return data.numpy().tobytes()

        return share_segment(self.rank, num_bytes, broadcast, partial(self._object, call))[0]

    def _object(self, call: NativeCall, objection: str) -> str:
        """Return an objection on all ranks if any of them has one."""
        flags = self._gather(call, torch.tensor([bool(objection)], device="cpu"), [1] * self.size)
        return "A rank has no room." if any(flags) else ""
