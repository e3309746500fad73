"""The collectives of c10d on a shared segment, for tensors on the CPU."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.shm import communicator
from lockstep.comm.shm.communicator import Communicator
from lockstep.comm.shm.work import ENDED, OpQueue, ShmWork
from lockstep.errors import CollectiveError, ConfigurationError

# Bring tensors into the form that the C library takes: contiguous, on the CPU, as addresses and sizes.


class Staged:
    """A context manager that gives contiguous tensors; those that had to be copied are copied back at its end.

    Args:
        tensors: Strided, on the CPU.
        write_back: Whether the tensors are written to.
    """

    def __init__(self, tensors: Sequence[Tensor], *, write_back: bool = True) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._write_back = write_back

    def __enter__(self) -> list[Tensor]:
        # Bits that are set lazily (conjugate, negative) are no bits in memory.
        self._staged = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in self._tensors]
        return self._staged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._write_back:
            for tensor, staged in zip(self._tensors, self._staged, strict=True):
                if staged.data_ptr() != tensor.data_ptr() or staged.stride() != tensor.stride():
                    tensor.copy_(staged)


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses for C; the tensors must outlive the call."""
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def sizes(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_uint64]:
    """Return the sizes in bytes for C; no tensor is none."""
    return (ctypes.c_uint64 * len(tensors))(*(0 if tensor is None else tensor.nbytes for tensor in tensors))


def rows(tensor: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Cut a contiguous tensor into flat pieces of so many elements."""
    flat, start = tensor.view(-1), 0
    for count in counts:
        yield flat[start : start + count]
        start += count


def check_equal_sizes(name: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Check that ``whole`` has room for the ``part`` of each rank.

    Raises:
        ConfigurationError: It has not, or is of another dtype.
    """
    if whole.dtype != part.dtype:
        raise ConfigurationError(f"{name}: both tensors must have one dtype; they have {whole.dtype} and {part.dtype}.")
    if whole.numel() != part.numel() * size:
        raise ConfigurationError(
            f"{name}: the large tensor must have {size} times as many elements as the small one, one part for each "
            f"rank; they have {whole.numel()} and {part.numel()}."
        )


# Tensors that lie in memory which all ranks of a group map, so that they are reduced where they lie.

PAGE_BYTES = 4096
BufferLocation = tuple[int, int, ctypes.Array[ctypes.c_void_p] | None]
"""Number of an allocation, offset in a rank's share of it, and where the ranks' shares lie."""
PRIVATE_MEMORY: BufferLocation = (-1, 0, None)
"""In this process's own memory."""


@dataclass(frozen=True)
class _Allocation:
    """Memory with a share for each rank; this rank's lies from ``start`` to ``end`` in its address space."""

    number: int
    start: int
    end: int
    parts: ctypes.Array[ctypes.c_void_p]
    memory: weakref.ref[mmap.mmap]


class SharedBuffers:
    """The allocations of one group that are still in use in this process."""

    def __init__(self, member: Communicator) -> None:
        self._member = member
        self._allocations: list[_Allocation] = []
        self._num_made = 0

    def add(self, memory: mmap.mmap, address: int, share_bytes: int) -> None:
        """Remember an allocation; as all ranks make them in the same order, they give it the same number."""
        size, rank = self._member.size, self._member.rank
        parts = (ctypes.c_void_p * size)(*(address + index * share_bytes for index in range(size)))
        start = address + rank * share_bytes
        self._allocations = [known for known in self._allocations if known.memory() is not None]
        self._allocations.append(_Allocation(self._num_made, start, start + share_bytes, parts, weakref.ref(memory)))
        self._num_made += 1

    def find_row(self, whole: Tensor, parts: Sequence[Tensor], own: Tensor) -> BufferLocation:
        """Return where ``whole`` lies, if ``own`` is this rank's among its ``parts``."""
        return self.find(whole) if parts[self._member.rank].data_ptr() == own.data_ptr() else PRIVATE_MEMORY

    def find(self, tensor: Tensor) -> BufferLocation:
        """Return where a contiguous tensor lies."""
        address = tensor.data_ptr()
        for known in self._allocations:
            if known.start <= address < known.end and known.memory() is not None:
                return known.number, address - known.start, known.parts
        return PRIVATE_MEMORY


# The queue of a group's calls, and the two of the C library that almost all of them are made of.
#
# Tensors that are not contiguous are copied when a call runs, and back afterwards.

NativeCall = Callable[..., None]
"""OpRunner a function of the C library with the group, the arguments and the time-out, and raises what comes of it."""


class OpRunner:
    """What one rank does on its group, one call after the other."""

    def __init__(self, member: Communicator, name: str) -> None:
        self.member = member
        self.buckets = SharedBuffers(member)
        self.queue = OpQueue(f"lockstep-shm-{name}")

    def submit(
        self, name: str, action: Callable[[NativeCall], None], outputs: Sequence[Any], opts: Any = None
    ) -> ShmWork:
        """OpQueue ``action``, which makes its calls with what it is given; return the handle."""
        self.member.ensure_usable(name)
        call = partial(self.member.call, name, self.timeout_of(opts))

        def guarded() -> None:
            try:
                action(call)
            except Exception as error:
                # The others are in this collective, or will be: without this they would wait for the time-out.
                self.member.give_up(CollectiveError(f"{name} failed: {error}"))
                raise

        work = ShmWork(self.queue, guarded, outputs)
        self.queue.add(work, is_async=getattr(opts, "asyncOp", True))
        return work

    def timeout_of(self, opts: Any) -> float:
        """Return the time-out in the options of a call, or the group's."""
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        return seconds if seconds > 0 else self.member.timeout_s

    def reduce_now(self, call: NativeCall, tensor: Tensor, number: int, *, root: int) -> None:
        """Reduce one tensor, in the thread whose turn it is."""
        wanted = root in (-1, self.member.rank)
        with Staged([tensor], write_back=wanted) as (staged,):
            data = communicator.as_numbers(staged)
            alloc, offset, parts = self.buckets.find(data)
            call(
                self.member.native.lockstep_all_reduce,
                data.data_ptr(),
                data.numel(),
                communicator.dtype_number(data.dtype),
                number,
                root,
                alloc,
                offset,
                parts,
            )

    def exchange_now(
        self,
        call: NativeCall,
        kind: int,
        sends: Sequence[Tensor | None],
        receives: Sequence[Tensor | None],
        *,
        root: int = -1,
        same: bool = False,
        place: BufferLocation = PRIVATE_MEMORY,
    ) -> None:
        """Exchange contiguous tensors, in the thread whose turn it is; with ``same``, each rank sends one tensor.

        ``place`` is that of what is received, if this rank sends what already lies at its own place in it.
        """
        call(
            self.member.native.lockstep_exchange,
            kind,
            root,
            int(same),
            pointers(sends),
            sizes(sends),
            pointers(receives),
            sizes(receives),
            *place,
        )


# Sum sparse tensors: gather every rank's indices and values, and add them up.


def reduce_sparse(calls: OpRunner, call: NativeCall, tensors: Sequence[Tensor], op: Any) -> None:
    """Replace each sparse COO tensor by the sum over all ranks, in the thread whose turn it is. Collective: every rank.

    Raises:
        ConfigurationError: The tensors are of another layout, or shall not be summed.
    """
    for tensor in tensors:
        if (
            tensor.layout != torch.sparse_coo
            or communicator.REDUCTIONS[communicator.reduction_of(op, tensor.dtype)] != "sum"
        ):
            raise ConfigurationError(
                f"The backend shm can sum sparse COO tensors, but not reduce {tensor.layout} with {op}."
            )
        mine = tensor.detach().coalesce()
        counts = _gather(calls, call, torch.tensor([mine._nnz()]), [1] * calls.member.size)
        lengths = [int(count) for count in counts]
        indices = _gather(calls, call, mine._indices().t().contiguous(), lengths)
        values = _gather(calls, call, mine._values().contiguous(), lengths)
        total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())


def _gather(calls: OpRunner, call: NativeCall, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    outputs = [mine.new_empty((length, *mine.shape[1:])) for length in lengths]
    calls.exchange_now(call, communicator.ALL_GATHER, [mine] * len(lengths), outputs, same=True)
    return outputs


# The collectives of c10d that compute, on a shared segment, for tensors on the CPU.
#
# Every method returns a work handle at once. What it needs is checked before, so that wrong calls raise here.


class Reductions:
    """What one rank calls on its group to reduce."""

    def __init__(self, calls: OpRunner) -> None:
        self._calls, self._size = calls, calls.member.size

    def all_reduce_at_once(self, tensor: Tensor, opts: Any) -> ShmWork | None:
        """Reduce in this thread, if nothing is queued and the tensor needs no copy; else return ``None``.

        Does the same as `allreduce` with less Python around it: at few bytes that is most of the time.
        """
        dtype = communicator.NUMBERS.get(tensor.dtype)
        if dtype is None or not tensor.is_contiguous() or tensor.is_neg():
            return None
        number = communicator.reduction_of(communicator.operation_of(opts), tensor.dtype)
        calls = self._calls
        if not calls.queue.take_turn():
            return None
        try:
            place = calls.buckets.find(tensor)
            function = calls.member.native.lockstep_all_reduce
            arguments = (tensor.data_ptr(), tensor.numel(), dtype, number, -1, *place)
            calls.member.call("all_reduce", calls.timeout_of(opts), function, *arguments)
        finally:
            calls.queue.end_turn()
        return ENDED

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ShmWork:
        """Replace each tensor by its reduction over all ranks. Collective: every rank."""
        op = communicator.operation_of(opts)
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._calls.submit(
                "all_reduce", lambda call: reduce_sparse(self._calls, call, tensors, op), tensors, opts
            )
        numbers = [communicator.reduction_of(op, tensor.dtype) for tensor in tensors]

        def action(call: NativeCall) -> None:
            for tensor, number in zip(tensors, numbers, strict=True):
                self._calls.reduce_now(call, tensor, number, root=-1)

        return self._calls.submit("all_reduce", action, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        """Replace rank ``opts.rootRank``'s tensors by the reduction over all ranks. Collective: every rank."""
        op = communicator.operation_of(opts)
        numbers = [communicator.reduction_of(op, tensor.dtype) for tensor in tensors]

        def action(call: NativeCall) -> None:
            for tensor, number in zip(tensors, numbers, strict=True):
                self._calls.reduce_now(call, tensor, number, root=opts.rootRank)

        return self._calls.submit("reduce", action, tensors, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> ShmWork:
        """Fill ``outputs[i]`` with the reduction of every rank's ``inputs[i][this rank]``. Collective: every rank."""
        op = communicator.operation_of(opts)
        numbers = [communicator.reduction_of(op, output.dtype) for output in outputs]
        for output, row in zip(outputs, inputs, strict=True):
            if len(row) != self._size:
                raise ConfigurationError(
                    f"reduce_scatter needs {self._size} input tensors, one for each rank; got {len(row)}."
                )
            own = row[self._calls.member.rank]
            if own.numel() != output.numel() or any(part.dtype != output.dtype for part in row):
                raise ConfigurationError(
                    "reduce_scatter: the output must have the size and dtype of this rank's input."
                )

        def action(call: NativeCall) -> None:
            for output, row, number in zip(outputs, inputs, numbers, strict=True):
                with Staged(row, write_back=False) as staged, Staged([output]) as (target,):
                    self._reduce_scatter_now(call, target, staged, number, PRIVATE_MEMORY)

        return self._calls.submit("reduce_scatter", action, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        """Fill each output with this rank's part of the reduced input. Collective: every rank."""
        op = communicator.operation_of(opts)
        numbers = [communicator.reduction_of(op, output.dtype) for output in outputs]
        for output, tensor in zip(outputs, inputs, strict=True):
            check_equal_sizes("reduce_scatter_tensor", tensor, output, self._size)

        def action(call: NativeCall) -> None:
            for output, tensor, number in zip(outputs, inputs, numbers, strict=True):
                with Staged([tensor], write_back=False) as (whole,), Staged([output]) as (target,):
                    parts = list(rows(whole, [output.numel()] * self._size))
                    place = self._calls.buckets.find_row(whole, parts, target)
                    self._reduce_scatter_now(call, target, parts, number, place)

        return self._calls.submit("reduce_scatter", action, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Fill ``output`` with this rank's part of the reduced ``tensor``. Collective: every rank."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def _reduce_scatter_now(
        self, call: NativeCall, output: Tensor, parts: Sequence[Tensor], number: int, place: BufferLocation
    ) -> None:
        inputs = [communicator.as_numbers(part) for part in parts]
        target = communicator.as_numbers(output)
        counts = (ctypes.c_uint64 * len(inputs))(*(part.numel() for part in inputs))
        native = self._calls.member.native
        dtype = communicator.dtype_number(target.dtype)
        call(native.lockstep_reduce_scatter, pointers(inputs), counts, target.data_ptr(), dtype, number, *place)


# The collectives of c10d that only move data, on a shared segment, for tensors on the CPU.
#
# Every method returns a work handle at once. What it needs is checked before, so that wrong calls raise here.


class DataMovement:
    """What one rank calls on its group to exchange tensors."""

    def __init__(self, calls: OpRunner) -> None:
        self._calls, self._size, self._rank = calls, calls.member.size, calls.member.rank

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        """Overwrite the tensors with those of rank ``opts.rootRank``. Collective: every rank."""
        root, me = opts.rootRank, self._rank

        def action(call: NativeCall) -> None:
            for tensor in tensors:
                with Staged([tensor], write_back=me != root) as (staged,):
                    sends = [staged if me == root and rank != root else None for rank in range(self._size)]
                    receives = [staged if me != root and rank == root else None for rank in range(self._size)]
                    self._calls.exchange_now(call, communicator.BROADCAST, sends, receives, root=root, same=True)

        return self._calls.submit("broadcast", action, tensors, opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> ShmWork:
        """Fill ``outputs[i]`` with every rank's ``inputs[i]``. Collective: every rank."""
        size = self._size
        for row in outputs:
            if len(row) != size:
                raise ConfigurationError(f"all_gather needs {size} output tensors, one for each rank; got {len(row)}.")

        def action(call: NativeCall) -> None:
            for row, tensor in zip(outputs, inputs, strict=True):
                with Staged([tensor], write_back=False) as (source,), Staged(row) as staged:
                    self._calls.exchange_now(call, communicator.ALL_GATHER, [source] * size, staged, same=True)

        return self._calls.submit("all_gather", action, [tensor for row in outputs for tensor in row], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        """Do as `allgather` does: here ``outputs`` has a row for each input, too."""
        return self.allgather(outputs, inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        """Fill each output with every rank's input, one after the other. Collective: every rank."""
        size = self._size
        for output, tensor in zip(outputs, inputs, strict=True):
            check_equal_sizes("all_gather_into_tensor", output, tensor, size)

        def action(call: NativeCall) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with Staged([tensor], write_back=False) as (source,), Staged([output]) as (whole,):
                    parts = list(rows(whole, [tensor.numel()] * size))
                    place = self._calls.buckets.find_row(whole, parts, source)
                    self._calls.exchange_now(
                        call, communicator.ALL_GATHER, [source] * size, parts, same=True, place=place
                    )

        return self._calls.submit("all_gather", action, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Fill ``output`` with every rank's ``tensor``. Collective: every rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> ShmWork:
        """Send ``inputs[r]`` to rank r and fill ``outputs[r]`` from it. Collective: every rank."""

        def action(call: NativeCall) -> None:
            with Staged(inputs, write_back=False) as sends, Staged(outputs) as receives:
                self._calls.exchange_now(call, communicator.ALL_TO_ALL, sends, receives)

        return self._calls.submit("all_to_all", action, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> ShmWork:
        """Send parts of ``tensor``, cut along its first dimension, and fill ``output``. Collective: every rank."""
        counts = [
            self._split("all_to_all_single", whole, splits)
            for whole, splits in ((tensor, input_splits), (output, output_splits))
        ]

        def action(call: NativeCall) -> None:
            with Staged([tensor], write_back=False) as (source,), Staged([output]) as (target,):
                sends, receives = (list(rows(*pair)) for pair in zip((source, target), counts, strict=True))
                self._calls.exchange_now(call, communicator.ALL_TO_ALL, sends, receives)

        return self._calls.submit("all_to_all", action, [output], opts)

    def _split(self, name: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        size, length = self._size, tensor.shape[0] if tensor.dim() else 1
        if not splits and length % size == 0:
            return [tensor.numel() // size] * size
        if len(splits) != size or sum(splits) != length:
            raise ConfigurationError(
                f"{name}: the splits {list(splits)} do not cut {length} rows into {size} parts.\n"
                "Without splits, the number of rows must be a multiple of the number of ranks."
            )
        row = tensor.numel() // length if length else 0
        return [split * row for split in splits]

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> ShmWork:
        """Fill rank ``opts.rootRank``'s ``outputs[0]`` with every rank's input. Collective: every rank."""
        size, root, is_root = self._size, opts.rootRank, self._rank == opts.rootRank
        targets = list(outputs[0]) if is_root and outputs else []
        if is_root and len(targets) != size:
            raise ConfigurationError(f"gather needs {size} output tensors, one for each rank; got {len(targets)}.")

        def action(call: NativeCall) -> None:
            with Staged(inputs, write_back=False) as (source,), Staged(targets) as staged:
                sends = [source if rank == root else None for rank in range(size)]
                self._calls.exchange_now(
                    call, communicator.GATHER, sends, staged or [None] * size, root=root, same=True
                )

        return self._calls.submit("gather", action, targets, opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> ShmWork:
        """Fill ``outputs[0]`` with rank ``opts.rootRank``'s ``inputs[0][this rank]``. Collective: every rank."""
        size, root, is_root = self._size, opts.rootRank, self._rank == opts.rootRank
        sources = list(inputs[0]) if is_root and inputs else []
        if is_root and len(sources) != size:
            raise ConfigurationError(f"scatter needs {size} input tensors, one for each rank; got {len(sources)}.")

        def action(call: NativeCall) -> None:
            with Staged(sources, write_back=False) as staged, Staged(outputs) as (target,):
                receives = [target if rank == root else None for rank in range(size)]
                self._calls.exchange_now(call, communicator.SCATTER, staged or [None] * size, receives, root=root)

        return self._calls.submit("scatter", action, outputs, opts)

    def barrier(self, opts: Any = None) -> ShmWork:
        """Wait for all ranks. Collective: every rank."""
        nobody: list[Tensor | None] = [None] * self._size
        return self._calls.submit(
            "barrier", lambda call: self._calls.exchange_now(call, communicator.BARRIER, nobody, nobody), [], opts
        )
