"""This process as a member of a group on shared memory: the C library, its calls and its errors."""

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError

INTERRUPTED_TYPE = ctypes.CFUNCTYPE(c_int)
MAX_RANKS = 64
OK, TIMED_OUT, DIED, WENT, BROKEN, MISMATCH, INTERRUPTED, STOPPED = range(8)


class CallRecord(ctypes.Structure):
    """What a rank called, as the others see it."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_int32),
        ("op", c_int32),
        ("root", c_int32),
        ("extent", c_uint64),
        ("alloc", c_int64),
        ("offset", c_uint64),
    )


_LOCATION = (c_int64, c_size_t, POINTER(c_void_p))  # allocation, offset, where the ranks' shares lie
_TENSORS = (POINTER(c_void_p), POINTER(c_uint64))  # addresses, sizes
_PIECES = (*_TENSORS, c_size_t, c_double, c_void_p)  # and how many, a factor, and where a flag is set
# Of a call that is made in two: until the other ranks can read what they need, and all that waits for theirs.
WHOLE, BEGIN, REST = range(3)
_SIGNATURES = {
    "segment_bytes": (c_size_t, [c_int, c_size_t, c_size_t]),
    "format": (None, [c_void_p, c_size_t, c_size_t]),
    "join": (c_void_p, [c_void_p, c_int, c_int, c_int, c_int, INTERRUPTED_TYPE]),
    "fail": (None, [c_void_p, c_char_p]),
    "stop": (None, [c_void_p]),
    "leave": (None, [c_void_p]),
    "failed_rank": (c_int, [c_void_p]),
    "missing": (c_uint64, [c_void_p]),
    "reason": (c_char_p, [c_void_p, c_int]),
    "call_of": (POINTER(CallRecord), [c_void_p, c_int]),
    "peer_state": (c_int, [c_void_p, c_int]),
    "bell": (c_uint32, [c_void_p]),
    "ring_bell": (None, [c_void_p, c_int]),
    "await_bell": (None, [c_void_p, c_uint32, c_int64]),
    "ring_write": (c_size_t, [c_void_p, c_int, c_void_p, c_size_t]),
    "ring_read": (c_size_t, [c_void_p, c_int, c_void_p, c_size_t]),
    "have_all_begun": (c_int, [c_void_p, c_int64]),
    "all_reduce": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, *_LOCATION, *_PIECES, c_int, c_int64]),
    "reduce_scatter": (c_int, [c_void_p, *_TENSORS, c_void_p, c_int, c_int, *_LOCATION, *_PIECES, c_int, c_int64]),
    "exchange": (c_int, [c_void_p, c_int, c_int, c_int, *_TENSORS, *_TENSORS, *_LOCATION, c_int64]),
}


@cache
def library() -> ctypes.CDLL | str:
    """Return the library, or why there is none. Calls into it do not hold the interpreter's lock."""
    spec = importlib.util.find_spec("lockstep.comm.shm._native")
    if spec is None or spec.origin is None:
        return "its C library was not built when lockstep was installed; install a C compiler and lockstep again"
    try:
        loaded = ctypes.CDLL(spec.origin)  # not PyDLL: waiting ranks must not hold the interpreter's lock
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"lockstep_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"its C library cannot be loaded: {error}"
    return loaded


@cache
def block_codec() -> tuple[Any, Any] | None:
    """Return the C functions that make blocks of small integers of float32, and numbers of them again, if there are."""
    loaded = library()
    if isinstance(loaded, str):
        return None
    encode, decode = loaded.lockstep_encode, loaded.lockstep_decode
    encode.restype = decode.restype = None
    encode.argtypes = [c_void_p, c_size_t, c_int, c_size_t, c_void_p, c_void_p]
    decode.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_size_t, c_void_p, c_int]
    return encode, decode


# The numbers under which operations, reductions and dtypes go into the C library.

# What is called; the C library knows the first two and moves bytes for the others.
Kind = IntEnum("Kind", "ALL_REDUCE REDUCE_SCATTER BROADCAST ALL_GATHER GATHER SCATTER ALL_TO_ALL BARRIER EMPTY_SHARED")

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
# Those that the C library computes with, by its own numbers.
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

_OTHERS = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - set(DTYPES)
_ALL_DTYPES = (*DTYPES, *sorted(_OTHERS, key=str))
# All that can be moved.
NUMBERS_OF_ALL = {dtype: number for number, dtype in enumerate(_ALL_DTYPES)}

# The kind of an exchange has the dtype's number, plus one, in its upper bits. The library moves bytes, whatever they
# mean, but it compares the kinds: so a tensor never arrives as one of another dtype.
EXCHANGED_DTYPE = 2**8

# Flags: a sum says whether any is set. They have no mean.
_LOGICAL = {"sum": "max", "product": "min", "band": "min", "bor": "max", "min": "min", "max": "max", "bxor": "bxor"}


def describe(call: CallRecord) -> str:
    """Return a call in words, such as ``all_reduce(sum) of 10 float32``."""
    number, kind = divmod(call.kind, EXCHANGED_DTYPE)
    name, number = Kind(kind).name.lower(), number - 1 if number else call.dtype
    dtype = str(_ALL_DTYPES[number]).removeprefix("torch.")
    if kind == Kind.ALL_REDUCE:
        to = f" to rank {call.root} of the group" if call.root >= 0 else ""
        return f"{name}({REDUCTIONS[call.op]}) of {call.extent} {dtype}{to}"
    if kind == Kind.REDUCE_SCATTER:
        return f"{name}({REDUCTIONS[call.op]}) of {dtype}"
    what = "" if kind == Kind.BARRIER else f" of {dtype}"
    return f"{name}{what}" + (f" from or to rank {call.root} of the group" if call.root >= 0 else "")


@cache
def reduction_of(op: Any, dtype: torch.dtype) -> int:
    """Return the number of an operation, see `operation_of`, for tensors of ``dtype``.

    Raises:
        ConfigurationError: It makes no sense for that dtype, or the backend does not have it.
    """
    name = str(op).rpartition(".")[2].lower()
    if dtype == torch.bool:
        known = _LOGICAL
    elif dtype.is_complex:
        known = {each: each for each in ("sum", "avg")}
    elif dtype not in NUMBERS:
        raise ConfigurationError(
            f"The backend shm cannot reduce {dtype} tensors, only move them.\nConvert them before the call."
        )
    else:
        senseless = ("band", "bor", "bxor") if dtype.is_floating_point else ("avg",)
        known = {each: each for each in REDUCTIONS if each not in senseless}
    if name not in known:
        raise ConfigurationError(
            f"The backend shm has no ReduceOp.{name.upper()} for {dtype}.\nIt has: {', '.join(known).upper()}."
        )
    return REDUCTIONS.index(known[name])


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor in a dtype that the C library knows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor


def operation_of(options: Any) -> Any:
    """Return the kind of ``ReduceOp`` in a c10d options object, or in what callers pass in its place."""
    op = dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    return getattr(op, "op", op)


# Reads of a word before going to sleep, some 60 microseconds; none where ranks must share cores. In training steps of 2
# ranks, who comes first to a reduction mostly waits for milliseconds, which no such budget covers. So the step times
# with 0 to 8,000 reads differ by less than the noise; 30,000 cost small models with ZeRO 12 %. With more ranks
# than cores 200 reads gained nothing.
SPINS = 2000


class Communicator:
    """One rank of a group that shares a segment.

    Attributes:
        native: The C library.
        handle: What it knows the group by.
        rank: This rank in the group.
        size: The number of ranks.
        ranks: Each member's rank in the whole job, for messages.
        timeout_s: How long a call may wait.
    """

    def __init__(
        self, native: ctypes.CDLL, segment: Segment, rank: int, size: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self.native, self.rank, self.size = native, rank, size
        self.ranks = list(ranks) or list(range(size))
        self.timeout_s = timeout_s
        self._segment = segment
        self._pid = os.getpid()
        self._signal: BaseException | None = None
        self._broken: LockstepError | None = None
        interruptions = self._interruptions()
        next(interruptions)
        self._callback = INTERRUPTED_TYPE(interruptions.__next__)  # kept: the C library holds only its address
        # With more ranks than cores, one that spins takes the core of the one that it waits for.
        spins = SPINS if size <= len(os.sched_getaffinity(0)) else 0
        handle = native.lockstep_join(segment.address, segment.fd, rank, size, spins, self._callback)
        if handle is None:
            raise CollectiveError(f"Rank {rank} cannot join the shared segment: another process has this rank.")
        self.handle: int = handle
        self._joined = True

    def ensure_usable(self, operation: str) -> None:
        """Raise if the group cannot be used (any more).

        Raises:
            LockstepError: It failed before, was closed, or was made in another process.
        """
        me = self.ranks[self.rank]
        # A fork copies the object and shares the memory: without this its calls would count as this rank's.
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"Process {os.getpid()} was forked from rank {me} and calls {operation} on its group.\n"
                "A forked process is not a member of the group. Start processes that communicate with the spawn method."
            )
        if self._broken is not None:
            # A new one, since a traceback grows each time that an exception is raised.
            raise type(self._broken)(*self._broken.args) from self._broken
        if not self._joined:
            raise CollectiveError(f"Rank {me} calls {operation}, but has destroyed this process group already.")

    def call(self, operation: str, timeout_s: float, function: Callable[..., int], *args: object) -> None:
        """Call a collective of the C library. Collective: every rank. Blocks at most about ``timeout_s``.

        Raises:
            LockstepError: It failed; the group is of no more use, and the other ranks learn why.
        """
        self.ensure_usable(operation)
        code = function(self.handle, *args, int(timeout_s * 1000))
        if code != OK:
            self._fail(code, operation, timeout_s)

    def have_all_begun(self, operation: str, patience_s: float) -> bool:
        """Return whether all ranks have begun the call that this one has begun; wait for that a moment."""
        code = self.native.lockstep_have_all_begun(self.handle, int(patience_s * 1000))
        if code not in (OK, TIMED_OUT):
            self._fail(code, operation, patience_s)
        return bool(code == OK)

    def _fail(self, code: int, operation: str, timeout_s: float) -> None:
        if code == INTERRUPTED:
            assert self._signal is not None
            error, self._signal = self._signal, None
            self.give_up(CollectiveError(f"Rank {self.ranks[self.rank]} was interrupted in {operation} on shm."))
            raise error
        found = self._error_of(code, f"Rank {self.ranks[self.rank]} in {operation} on shm", timeout_s)
        self.give_up(found)
        raise found

    def _error_of(self, code: int, where: str, timeout_s: float) -> CollectiveError:
        """Return the error for what the library returned; ranks are named as the whole job counts them."""
        if code == STOPPED:
            return CollectiveError(f"{where}: the group was closed in this process meanwhile.")
        if code == TIMED_OUT:
            # A bit for each rank that has not come, by its number in this group.
            missing = self.native.lockstep_missing(self.handle)
            names = ", ".join(str(rank) for index, rank in enumerate(self.ranks) if missing >> index & 1)
            return CollectiveError(
                f"{where} waited {timeout_s:g} s for rank {names}.\n"
                "That process is running, but is stopped, stuck or slow, or does not call as many collectives as the "
                "others. If it is only slow, pass a longer timeout when you create the group."
            )
        index = self.native.lockstep_failed_rank(self.handle)
        if code != MISMATCH:
            return self.peer_failure(code, where, index)
        rank = self.ranks[index]
        mine, theirs = (describe(self.native.lockstep_call_of(self.handle, r).contents) for r in (self.rank, index))
        if mine == theirs:
            return CollectiveError(
                f"{where}: rank {rank} sends a number of bytes that does not match this rank's buffer.\n"
                "The tensors must have the same shapes and dtypes on all ranks."
            )
        return CollectiveError(
            f"{where}: the ranks call different collectives. This rank calls {mine}; rank {rank} calls {theirs}.\n"
            "All ranks must call the same collectives in the same order, with the same shapes and dtypes."
        )

    def peer_failure(self, code: int, where: str, index: int) -> CollectiveError:
        """Return the error about rank ``index`` of the group, which will never come."""
        rank = self.ranks[index]
        if code == DIED:
            return CollectiveError(
                f"{where} waited for rank {rank}, whose process has ended.\n"
                f"It was killed, or failed first: look at the output of rank {rank}."
            )
        if code == WENT:
            return CollectiveError(
                f"{where} waited for rank {rank}, which has left the group.\n"
                "It destroyed its process group before this call; all ranks must call the same collectives."
            )
        reason = (self.native.lockstep_reason(self.handle, index) or b"").decode(errors="replace")
        return CollectiveError(f"{where} waited for rank {rank}, which gave up:\n{reason}")

    def give_up(self, reason: LockstepError) -> None:
        """Let the other ranks know that this one will not come any more, and why."""
        if self._joined and self._broken is None:
            self._broken = reason
            # The shared memory has room for so much; the first lines name the rank and the cause.
            self.native.lockstep_fail(self.handle, str(reason).encode()[:500])

    def stop(self) -> None:
        """Let calls in other threads of this process return soon."""
        if self._joined:
            self.native.lockstep_stop(self.handle)

    def leave(self) -> None:
        """Leave the group. No thread may be in a call any more."""
        # Not in a forked child, whose copy of this object ends when the child does.
        if self._joined and os.getpid() == self._pid:
            self._joined = False
            self.native.lockstep_leave(self.handle)
            # Lets go of the lock by which the others know that this process lives.
            self._segment.close_file()

    def _interruptions(self) -> Iterator[int]:
        """Give 0 again and again, 1 after a signal handler has raised; called while the main thread waits in C.

        A generator, because handlers run as soon as Python code does, and so inside of ``try`` only where the code goes
        on after a ``yield``; a function would begin before its ``try``.
        """
        while True:
            try:
                while True:
                    yield 0
            except GeneratorExit:
                return
            except BaseException as error:  # KeyboardInterrupt, or what a handler raised: passed on by `call`
                self._signal = error
            yield 1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.leave()
