"""Fewer bits between ranks: codecs, the compressed sum of a flat tensor, and the compressed mean of gradients.

[Note: error feedback]
A rank rounds the values that it sends. It keeps the rounding error, the *residual*, and adds it to the next values. So
the sum of all received values differs from the exact sum only by the current residuals, however many steps there were.
The sum of the residuals over the ranks is the part of the result that was not sent yet. This sum does not change if
residuals move between ranks, so a run on another number of ranks can divide them in any way.

[Note: the exchange]
A flat tensor is cut into as many slices as there are ranks; each rank *owns* one.

    1. Each rank encodes the slices of the others and sends them to their owners.
    2. An owner decodes the received slices and adds them, in the order of ranks, to its own slice, which is not
       rounded. It encodes the sum and sends it to all. The rounding error of the sum is the owner's residual.
    3. All ranks, including the owner, decode the sums, so all have the same bits.

A rank sends 2 (n - 1) / n times the encoded bytes. Exact data, such as the tail of a bucket, goes to every rank in the
messages of the first round, and each rank sums it.

[Note: compression between machines only]
In a hierarchy of groups the ranks of a machine sum a flat tensor in shared memory. Each rank then owns a part of it. It
exchanges this part, compressed, with the ranks with the same local rank on the other machines, and has residuals of
this part only. It sets the other parts to zero, and a second sum inside the machine assembles the tensor: adding zeros
does not change a value.

[Note: what is not finite]
A block that contains NaN or infinity on any rank is NaN on all ranks after the exchange. Its residual restarts from
zero, so that one bad step does not affect later steps. PowerSGD does the same with the whole matrix.

[Note: order]
Both rounds are sends and receives between two ranks, with a tag for the exchange and the round. Tags are assigned when
an exchange starts, and all ranks start exchanges in the same order. After that, the order of messages does not matter:
rounds of different buckets, and collectives that the script runs on the same group, cannot be confused. An exchange is
a generator that yields where it would wait for a round. Three threads of each process group (`_Pipeline`) drive it: the
first encodes and starts the first round, the second starts the second round, and the third completes the exchange. Each
thread takes exchanges in order, so one thread can compute while another waits for the network. They are daemon threads
and end with the interpreter. An error goes to the future of the exchange, and is raised where that is waited for.
"""

from __future__ import annotations

import itertools
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lockstep.base.accelerator import is_capturing, recorded_event, start_thread, synchronize
from lockstep.comm.collectives import (
    Group,
    Work,
    all_reduce_work,
    cpu_group,
    is_native,
    started,
    wait_for,
    wait_for_transfer,
)
from lockstep.comm.hierarchy import HierarchicalProcessGroup, start_exchange
from lockstep.comm.network import gloo_cause, wait_for_call
from lockstep.comm.shm.communicator import block_codec
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, is_of_signal_handler
from lockstep.parallel.ddp.buckets import Bucket, BucketSet
from lockstep.parallel.ddp.comm_hooks import BucketReduction, CastAllReduce, Pending, is_compressible
from lockstep.parallel.flat import cut_views

# A tensor within a flat one: a key that is the same in every step, and its shape.
Members = Sequence[tuple[int, torch.Size]]
Pair = tuple[Tensor, Tensor]

_NOTHING = torch.empty(0, device="cpu")


# --- codecs -----------------------------------------------------------------------------------------------------------


class Codec(ABC):
    """The encoding of numbers in messages. Created by `make`, one per model, since it may keep state between steps.

    Attributes:
        keeps_residual: Whether rounding errors are sent later, see [Note: error feedback].
        takes_whole: Whether it needs whole members.
    """

    keeps_residual = True
    takes_whole = False

    @abstractmethod
    def sum(self, peers: _Peers, values: Tensor, result: Tensor, exact: Tensor, members: Members) -> Iterator[None]:
        """Sum over the ranks, in rounds of messages; see [Note: the exchange].

        Yields when the messages of a round are on their way. Whoever drives the exchange does other work meanwhile, and
        resumes it in a thread that may wait for them; see [Note: order].

        Args:
            peers: The ranks that take part.
            values: Flat, float32: this rank's part of the sum, with its residual. Afterwards the new residual.
            result: Like ``values``: gets the sum. May be ``values`` itself if the codec keeps no residual.
            exact: Flat: replaced by its sum, which is not rounded.
            members: The tensors in ``values``, in order.
        """


class SliceCodec(Codec):
    """Encodes each number, or each block of numbers, separately, so slices can be sent; see [Note: the exchange].

    Attributes:
        block: Slices begin at multiples of it.
    """

    block = 1

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Return the encoded size of ``numel`` numbers in bytes."""

    @abstractmethod
    def encode(self, values: Tensor, to: Tensor) -> None:
        """Write ``values``, flat and float32, to the bytes ``to``; leave the residual in ``values``, if it is kept."""

    @abstractmethod
    def decode(self, data: Tensor, to: Tensor, *, adds: bool = False) -> None:
        """Decode ``data`` and write the numbers to ``to``, or add them to it."""

    @override
    def sum(self, peers: _Peers, values: Tensor, result: Tensor, exact: Tensor, members: Members) -> Iterator[None]:
        rank, size = peers.rank, peers.size
        num_blocks = -(-values.numel() // self.block)
        bounds = [min(num_blocks * index // size * self.block, values.numel()) for index in range(size + 1)]
        slices = [slice(*ends) for ends in itertools.pairwise(bounds)]
        own_slice = values[slices[rank]]
        others = [other for other in range(size) if other != rank]
        exact_bytes = exact.view(torch.uint8)
        start = -(-exact.nbytes // 8) * 8  # the data after it is read as numbers of up to 8 bytes

        # First round: the slices of the others go to their owners, and theirs of this rank's slice arrive.
        sent: dict[int, Tensor] = {}
        for other in others:
            piece = values[slices[other]]
            sent[other] = torch.empty(start + self.num_bytes(piece.numel()), dtype=torch.uint8)
            sent[other][: exact.nbytes] = exact_bytes
            self.encode(piece, sent[other][start:])
        length = start + self.num_bytes(own_slice.numel())
        received = {other: torch.empty(length, dtype=torch.uint8) for other in others}
        peers.post(sent, received)
        yield

        # Second round: this rank's slice is complete and goes to all; theirs arrive.
        peers.wait()
        exact_parts = {other: data[: exact.nbytes].view(exact.dtype) for other, data in received.items()}
        exact_parts[rank] = exact.clone()
        exact.zero_()
        for member in range(size):
            exact += exact_parts[member]
        for data in received.values():
            self.decode(data[start:], own_slice, adds=True)
        total = torch.empty(self.num_bytes(own_slice.numel()), dtype=torch.uint8)
        self.encode(own_slice, total)
        sizes = {other: self.num_bytes(values[slices[other]].numel()) for other in others}
        sums = {other: torch.empty(num_bytes, dtype=torch.uint8) for other, num_bytes in sizes.items()}
        peers.post(dict.fromkeys(others, total), sums)
        self.decode(total, result[slices[rank]])  # as the others do, so that all have the same bits
        yield

        peers.wait()
        for other, data in sums.items():
            self.decode(data, result[slices[other]])


@final
class Cast(SliceCodec):
    """Numbers in another dtype. The rounding error is small and is not kept."""

    keeps_residual = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @override
    def num_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    @override
    def encode(self, values: Tensor, to: Tensor) -> None:
        to.view(self.dtype).copy_(values)

    @override
    def decode(self, data: Tensor, to: Tensor, *, adds: bool = False) -> None:
        numbers = data.view(self.dtype)
        to.add_(numbers) if adds else to.copy_(numbers)


@final
class Blocks(SliceCodec):
    """Integers of 8 or 4 bits: each block holds multiples of one scale, a bfloat16.

    The C library needs one pass over memory; ``comm/shm/_quantize.c`` explains its bounds.

    Numbers are rounded to the nearest. With stochastic rounding the error is 1.4 times as large, also summed over
    steps, since error feedback does not need errors with mean zero (``bench/compression.py``).
    """

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block
        self._encode, self._decode = block_codec()

    @override
    def num_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + -(-numel * self.bits // 8)

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block) * 2

    @override
    def encode(self, values: Tensor, to: Tensor) -> None:
        address, count = to.data_ptr(), values.numel()
        self._encode(values.data_ptr(), count, self.bits, self.block, address, address + self._scale_bytes(count))

    @override
    def decode(self, data: Tensor, to: Tensor, *, adds: bool = False) -> None:
        address, count = data.data_ptr(), to.numel()
        self._decode(address, address + self._scale_bytes(count), count, self.bits, self.block, to.data_ptr(), adds)


class _Matrix(NamedTuple):
    key: int
    values: Tensor
    result: Tensor


@final
class PowerSGD(Codec):
    """Matrices as products of two narrow ones. Matrices that are too small for that are sent unchanged.

    A parameter of shape (m, ...) is a matrix M of m rows. With Q from the step before (*warm start*) the ranks sum
    P = M Q, make its columns orthonormal, and sum Q = M' P. The sum of the matrices is then about P Q': one step of a
    subspace iteration. The ranks send (m + n) * rank numbers instead of m * n.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019). There, a rank's residual is the difference between
    its matrix and the mean. Here it is the difference between its matrix and its own projection, M - P (M' P)'. The
    sums of both are equal, and with these the residuals do not grow if ranks have different data.

    Attributes:
        bases: By key of a matrix: Q, the same on all ranks.
    """

    takes_whole = True

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bases: dict[int, Tensor] = {}
        self._numbers = Cast(torch.float32)

    @override
    def sum(self, peers: _Peers, values: Tensor, result: Tensor, exact: Tensor, members: Members) -> Iterator[None]:
        matrices, others = self._sort(values, result, members)
        lefts = [matrix.values @ self._basis(matrix) for matrix in matrices]
        sums = yield from self._sum(peers, lefts + [part for part, _ in others], exact)

        for (part, to), total in zip(others, sums[len(matrices) :], strict=True):
            to.copy_(total)
            part.zero_()
        # All ranks have the same sums, so they agree on which are not finite.
        finite = [bool(total.isfinite().all()) for total in sums[: len(matrices)]]
        lefts = [torch.linalg.qr(total).Q if ok else total.zero_() for total, ok in zip(sums, finite, strict=False)]
        rights = [matrix.values.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        totals = yield from self._sum(peers, rights, _NOTHING.clone())

        for matrix, left, right, total, is_finite in zip(matrices, lefts, rights, totals, finite, strict=True):
            if not is_finite:  # see [Note: what is not finite]
                matrix.result.fill_(torch.nan)
                matrix.values.zero_()
                continue
            matrix.result.copy_(left @ total.t())
            matrix.values.addmm_(left, right.t(), alpha=-1)
            if bool(total.any()):  # otherwise no rank used the parameter, and the basis does not change
                self.bases[matrix.key] = total

    def _sort(self, values: Tensor, result: Tensor, members: Members) -> tuple[list[_Matrix], list[Pair]]:
        """Return the members that are sent as products, and the others."""
        sizes = [shape.numel() for _, shape in members]
        matrices: list[_Matrix] = []
        others: list[Pair] = []
        for (key, shape), part, to in zip(members, values.split(sizes), result.split(sizes), strict=True):
            num_rows = shape[0] if shape else 1
            num_columns = part.numel() // max(1, num_rows)
            if min(self.rank, num_rows, num_columns) * (num_rows + num_columns) < part.numel():
                matrices.append(_Matrix(key, part.view(num_rows, -1), to.view(num_rows, -1)))
            else:
                others.append((part, to))
        return matrices, others

    def _basis(self, matrix: _Matrix) -> Tensor:
        """Return the initial orthonormal basis: that of the step before, or a random one, equal on all ranks."""
        shape = (matrix.values.shape[1], min(self.rank, *matrix.values.shape))
        basis = self.bases.get(matrix.key)
        if basis is None or basis.shape != shape:
            basis = torch.randn(shape, generator=torch.Generator().manual_seed(matrix.key))
        orthonormal: Tensor = torch.linalg.qr(basis).Q
        return orthonormal

    def _sum(self, peers: _Peers, tensors: Sequence[Tensor], exact: Tensor) -> Generator[None, None, list[Tensor]]:
        """Return the sums of ``tensors`` over the ranks, in two rounds."""
        flat = torch.cat([_NOTHING, *(tensor.reshape(-1) for tensor in tensors)])
        yield from self._numbers.sum(peers, flat, flat, exact, ())
        parts = flat.split([tensor.numel() for tensor in tensors])
        # Copies are aligned for vector instructions, so their products have the same bits on all ranks, wherever the
        # original memory is.
        return [part.clone().view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


# Shorter blocks fit the magnitudes of the numbers better; longer ones have fewer scales: see bench/compression.py.
_BLOCKS = {"int8": (8, 256), "int4": (4, 128)}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
METHODS = (*_DTYPES, *_BLOCKS, "powersgd:RANK")


def check_method(method: Any) -> int | None:
    """Return the rank in ``powersgd:RANK``; None for another method.

    Raises:
        ConfigurationError: There is no such method.
    """
    text = method if isinstance(method, str) else ""
    match = re.fullmatch(r"powersgd:0*([1-9]\d*)", text)
    if match is None and text not in _DTYPES and text not in _BLOCKS:
        raise ConfigurationError(
            f"compression={method!r} is not a compression method.\n"
            f"Give one of {', '.join(METHODS)} with a rank of at least 1, or None."
        )
    return None if match is None else int(match[1])


def make(method: str) -> Codec:
    """Return the codec ``bf16``, ``fp16``, ``int8``, ``int4`` or ``powersgd:RANK``.

    Raises:
        ConfigurationError: There is no such method.
    """
    rank = check_method(method)
    if rank is not None:
        return PowerSGD(rank)
    return Cast(_DTYPES[method]) if method in _DTYPES else Blocks(*_BLOCKS[method])


# --- the exchange -----------------------------------------------------------------------------------------------------

# Outside of the tags that a script is likely to use. An exchange has at most four rounds.
_FIRST_TAG, _NUM_EXCHANGES, _MAX_ROUNDS = 2**30, 2**24, 4


@final
class _Peers:
    """The ranks of ``group`` in one exchange, which runs its rounds in order; see [Note: order]."""

    def __init__(self, group: Group, number: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._tag = _FIRST_TAG + number % _NUM_EXCHANGES * _MAX_ROUNDS
        self._works: list[tuple[int, Work]] = []
        self._tensors: list[Tensor] = []

    def post(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Start a round: send to ranks and receive from ranks, by rank. Empty tensors are skipped."""
        self._tensors = [*sent.values(), *received.values()]  # kept alive: not every backend does that
        self._works = start_exchange(self._group, sent, received, self.rank, self._tag)
        self._tag += 1

    def wait(self) -> None:
        """Block until the round is complete.

        Raises:
            CollectiveError: A rank ended, or did not take part in time.
        """
        for peer, work in self._works:
            try:
                wait_for_transfer(work, self._group)
            except RuntimeError as error:
                if isinstance(error, LockstepError) or is_of_signal_handler(error):
                    raise
                raise CollectiveError(
                    f"the exchange of compressed numbers with rank {peer} of the group failed: {gloo_cause(error)}"
                ) from error
        self._works, self._tensors = [], []


Exchange = Generator[None, None, None]


@final
class _Pipeline:
    """The threads that drive the exchanges of one process group, with buckets on ``device``; see [Note: order]."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = itertools.count()
        self._queues = [SimpleQueue[Any]() for _ in range(3)]
        for queue, following in itertools.zip_longest(self._queues, self._queues[1:]):
            start_thread(partial(_drive, queue, following), name="lockstep-compression", device=device)
        # Ends the threads when the group is freed, and before the interpreter ends.
        weakref.finalize(self, self._queues[0].put, None)

    @classmethod
    def start(cls, group: Group, exchange: Callable[[_Peers], Exchange], device: torch.device) -> Future[Any]:
        """Start an exchange in ``group``; return its future. Collective: every rank. Does not block."""
        pipeline = _pipelines.get(group)
        if pipeline is None:
            pipeline = _pipelines[group] = cls(device)
        future: Future[Any] = Future()
        pipeline._queues[0].put((exchange(_Peers(group, next(pipeline._numbers))), future))
        return future


_pipelines: weakref.WeakKeyDictionary[Group, _Pipeline] = weakref.WeakKeyDictionary()


def _drive(queue: SimpleQueue[Any], following: SimpleQueue[Any] | None) -> None:
    """Run each exchange of ``queue`` up to its next round and pass it on; the last thread completes it."""
    torch.set_grad_enabled(False)  # of this thread
    while (item := queue.get()) is not None:
        exchange, future = item
        try:
            for _ in exchange:
                if following is not None:
                    following.put(item)
                    break
            else:
                future.set_result(None)
        except Exception as error:
            future.set_exception(error)
        del item, exchange, future  # a waiting thread must hold no tensors
    if following is not None:
        following.put(None)


# --- flat tensors -----------------------------------------------------------------------------------------------------


def _own_part(hierarchy: HierarchicalProcessGroup | None, members: Members, codec: Codec) -> tuple[slice, Members]:
    """Return the elements of a flat tensor that this rank exchanges, and their members; None: all."""
    place, num_places = (0, 1) if hierarchy is None else (hierarchy.inside.rank(), hierarchy.inside.size())
    ends = list(itertools.accumulate((shape.numel() for _, shape in members), initial=0))
    cuts = [ends[-1] * index // num_places for index in range(num_places + 1)]
    if codec.takes_whole:
        cuts = [next(end for end in ends if end >= cut) for cut in cuts]
    part = slice(cuts[place], cuts[place + 1])
    return part, [member for member, start in zip(members, ends, strict=False) if part.start <= start < part.stop]


def _zero_other_parts(flat: Tensor, part: slice) -> None:
    flat[: part.start].zero_()
    flat[part.stop :].zero_()


@final
class CompressedSum:
    """The sum of a flat tensor over two or more ranks, compressed between machines, with the same bits on all ranks.

    Collective: every rank creates it.

    Args:
        flat: The tensor to sum, of any floating dtype and on any device; encoded from float32 on the CPU.
        shapes: The shapes of the tensors in it, in order; PowerSGD sends them as matrices.
        method: See `make`.
        group: The ranks.

    Attributes:
        codec: Of this tensor.
        residual: What this rank has not sent yet, if the codec keeps it. Part of the state.
    """

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size], method: str, group: Group) -> None:
        self._flat, self.codec = flat, make(method)
        whole = cpu_group(group)
        # All ranks must have all of PowerSGD's bases, so it sends between all of them.
        self._hierarchy = whole if isinstance(whole, HierarchicalProcessGroup) and not self.codec.takes_whole else None
        self._between = whole if self._hierarchy is None else self._hierarchy.between
        self._part, self._members = _own_part(self._hierarchy, list(enumerate(shapes)), self.codec)
        self._values = torch.zeros(flat.numel(), device="cpu")
        self._own_values = self._values[self._part]
        self.residual = torch.zeros_like(self._own_values) if self.codec.keeps_residual else None

    def start(self) -> Callable[[str], object]:
        """Start to sum; return a function that waits. Collective: every rank. Blocks for the ranks of this machine.

        Do not use the tensor and ``residual`` until it has returned.

        Raises:
            CollectiveError: From the function: a rank ended, or did not take part in time.
        """
        self._values.copy_(self._flat)
        if self._hierarchy is not None:
            wait_for(self._hierarchy.all_reduce_inside(self._values), "all_reduce inside the machine")
        return partial(self._wait, _Pipeline.start(self._between, self._sum, self._values.device))

    def _sum(self, peers: _Peers) -> Exchange:
        values = self._own_values if self.residual is None else self.residual.add_(self._own_values)
        yield from self.codec.sum(peers, values, self._own_values, _NOTHING.clone(), self._members)

    def _wait(self, future: Future[Any], operation: str) -> None:
        wait_for(future, operation)
        if self._hierarchy is not None:
            _zero_other_parts(self._values, self._part)
            wait_for(self._hierarchy.all_reduce_inside(self._values), operation)
        self._flat.copy_(self._values)


# --- buckets of gradients ---------------------------------------------------------------------------------------------


def make_reduction(method: str, bucket_set: BucketSet, group: Group) -> BucketReduction:
    """Return the reduction of a model's buckets with ``method``; see `make`.

    Raises:
        ConfigurationError: There is no such method, or the group cannot send messages.
    """
    codec = make(method)
    if isinstance(codec, Cast) and not isinstance(group, HierarchicalProcessGroup):
        return CastAllReduce(bucket_set, group, codec.dtype)
    if not is_native(group):
        raise ConfigurationError(
            f"compression={method!r} sends messages between two ranks, which the process group {type(group).__name__} "
            "may not do as torch's do.\nUse a group on Gloo, or compression='bf16'."
        )
    return CompressedMean(bucket_set, group, codec)


@final
class CompressedMean(BucketReduction):
    """The mean over ranks in compressed messages, in parallel to backward; for buckets of float32 and float64.

    [Note: residuals of parameters]
    Residuals are float32, on the CPU, in one flat tensor for each bucket; they move when the buckets are rebuilt. A
    parameter that received no gradient on this rank keeps its residual for later. If no rank used the parameter, its
    gradient does not change, so the values that were sent had no effect, and its residual is restored.

    Between machines, see [Note: compression between machines only], residuals may lie in another rank's part after
    buckets were rebuilt or a state was loaded; they are summed inside the machine in the next step.

    [Note: compression of GPU gradients]
    They are copied to the host, encoded and sent over Gloo, and the mean is copied back. On a network where compression
    helps, the network is slower than these copies. Copies to the host use a separate stream, in parallel to backward;
    a thread waits for them. Copies to the device are on the stream that finishes the bucket: nothing waits for them.

    Args:
        bucket_set: The buckets to reduce.
        group: The ranks that take part.
        codec: The encoding of gradients. Tails are not encoded.
    """

    def __init__(self, bucket_set: BucketSet, group: Group, codec: Codec) -> None:
        self._bucket_set, self._group, self._codec = bucket_set, group, codec
        self._hierarchy = group if isinstance(group, HierarchicalProcessGroup) else None
        self._messages = self._hierarchy and self._hierarchy.between  # the group that sends; None: found later
        self.finishes_alone = self._hierarchy is None
        self._stream: torch.Stream | None = None  # of copies to the host
        self._on_host: dict[Bucket, Tensor] = {}  # payloads, from `start` to `finish`
        # By the parameters of a bucket, since buckets from `BucketSet.scratch` share the residuals of the others.
        self._flat: dict[tuple[int, ...], Tensor] = {}
        self._residuals: dict[str, Tensor] = {}  # views of the flat tensors
        self._settled: set[tuple[int, ...]] = set()  # keys of `_flat` that hold only this rank's part
        bucket_set.on_rebuilt.append(self._on_rebuilt)

    @override
    def start(self, bucket: Bucket, *, alone: bool) -> Pending:
        if not is_compressible(bucket):
            return started(all_reduce_work(bucket.payload, group=self._group), bucket.payload, self._group)
        before: list[Callable[[], object]] = []
        if self._hierarchy is not None:
            before.append(self._hierarchy.all_reduce_inside(bucket.payload).wait)
            if self._codec.keeps_residual and bucket.spec.parameters not in self._settled:
                before.append(self._hierarchy.all_reduce_inside(self._residual(bucket)).wait)
        elif not bucket.payload.is_cpu:
            if is_capturing(bucket.spec.device):
                raise ConfigurationError(
                    "Compressed gradients are sent by the host, which a CUDA graph cannot capture.\n"
                    "Leave compression out, or train eagerly."
                )
            self._stream = self._stream or torch.Stream(bucket.spec.device)
            self._stream.wait_stream(torch.accelerator.current_stream(bucket.spec.device))
            with self._stream:
                # New memory, which torch's allocator reuses only when the copy back, on any stream, is over.
                host = torch.empty_like(bucket.payload, device="cpu", pin_memory=True)
                self._on_host[bucket] = host.copy_(bucket.payload, non_blocking=True)
                before.append(partial(synchronize, recorded_event(bucket.spec.device)))
        if self._messages is None:
            self._messages = cpu_group(self._group)
        exchange = partial(self._reduce, bucket, self._on_host.get(bucket, bucket.payload), before)
        return _Pipeline.start(self._messages, exchange, bucket.spec.device)

    @override
    def finish(self, bucket: Bucket, future: Pending) -> None:
        wait_for_call(future)
        if bucket in self._on_host:
            bucket.payload.copy_(self._on_host.pop(bucket), non_blocking=True)
        if self._hierarchy is not None and is_compressible(bucket):
            wait_for(self._hierarchy.all_reduce_inside(bucket.gradients), "all_reduce inside the machine")

    def _reduce(self, bucket: Bucket, payload: Tensor, before: Sequence[Any], peers: _Peers) -> Exchange:
        for wait in before:
            wait()
        members = [(index, param.shape) for index, param in zip(bucket.spec.parameters, bucket.parameters, strict=True)]
        sizes = [shape.numel() for _, shape in members]
        gradients, tail = payload[: sum(sizes)], payload[bucket.tail_start :]
        part, own_members = _own_part(self._hierarchy, members, self._codec)
        result = gradients[part].float()  # no copy if it is float32 already
        values, held_back = result, []
        if self._codec.keeps_residual:
            residual = self._residual(bucket)
            self._settle(bucket, part)
            for place, (view, count) in enumerate(zip(residual.split(sizes), tail.tolist(), strict=False)):
                if not count:  # see [Note: residuals of parameters]
                    held_back.append((place, view, view.clone()))
                    view.zero_()
            values = residual[part]
            values += result
        yield from self._codec.sum(peers, values, result, tail, own_members)
        for place, view, before in held_back:
            if tail[place]:
                view += before
            else:
                view.copy_(before)
        if result.data_ptr() != gradients[part].data_ptr():
            gradients[part] = result
        _zero_other_parts(gradients, part)

    # --- residuals between steps --------------------------------------------------------------------------------------

    def _on_rebuilt(self, _: Sequence[Bucket]) -> None:
        self._flat.clear()
        self._settled.clear()

    def _settle(self, bucket: Bucket, part: slice) -> None:
        """After the residuals of this machine's ranks were summed, keep only those of this rank's part."""
        if bucket.spec.parameters not in self._settled:
            self._settled.add(bucket.spec.parameters)
            _zero_other_parts(self._residual(bucket), part)

    def _residual(self, bucket: Bucket) -> Tensor:
        """Return the residuals of a bucket, including those of its parameters in buckets of an earlier plan."""
        flat = self._flat.get(bucket.spec.parameters)
        if flat is None:
            flat = torch.zeros(sum(parameter.numel() for parameter in bucket.parameters), device="cpu")
            self._flat[bucket.spec.parameters] = flat
            for name, view in zip(bucket.names, cut_views(flat, bucket.parameters), strict=True):
                if name in self._residuals:
                    view.copy_(self._residuals[name])
                self._residuals[name] = view
        return flat

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's ``residuals`` by parameter, and PowerSGD's ``bases``, which are equal on all ranks."""
        names = self._bucket_set.names
        for bucket in filter(is_compressible, self._bucket_set.buckets if self._codec.keeps_residual else ()):
            self._residual(bucket)
        bases = self._codec.bases if isinstance(self._codec, PowerSGD) else {}
        return {"residuals": dict(self._residuals), "bases": {names[key]: basis for key, basis in bases.items()}}

    def load_state_dict(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Load the sum of the residuals of ``states``, and the bases of the first state; without states: reset.

        Raises:
            ConfigurationError: The states belong to another model.
        """
        residuals, frozen = self.state_dict()["residuals"], self._bucket_set.frozen
        for state in states:
            for name, tensor in state["residuals"].items() if residuals else ():
                like = residuals.get(name, frozen.get(name))
                if like is not None and name not in residuals:  # it may be unfrozen again
                    residuals[name] = self._residuals[name] = torch.zeros(like.shape, device="cpu")
                if like is None or like.shape != tensor.shape:
                    raise ConfigurationError(
                        f"The state of compression has a residual of {name}, {list(tensor.shape)}, which the model "
                        "lacks.\nLoad the state of the same model, or pass none to start without residuals."
                    )
        for name, view in residuals.items():
            view.zero_()
            for state in states:
                view += state["residuals"].get(name, 0)
        self._settled.clear()
        self.load_bases(states[0]["bases"] if states else {})

    def load_bases(self, bases: Mapping[str, Tensor]) -> None:
        """Load PowerSGD's bases; those of parameters that the model lacks are left out."""
        if isinstance(self._codec, PowerSGD):
            keys = {name: key for key, name in enumerate(self._bucket_set.names)}
            self._codec.bases = {keys[name]: basis.clone() for name, basis in bases.items() if name in keys}
