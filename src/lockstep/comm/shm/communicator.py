"""This process as a member of a group on shared memory: the C library, its calls and its errors."""

import contextlib
import ctypes
import importlib.util
import os
import threading
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
    """The call of a rank, as the other ranks see it."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "dtype", "op", "root")),
        *(("extent", c_uint64), ("alloc", c_int64), ("offset", c_uint64)),
    )


_LOCATION = (c_int64, c_size_t, POINTER(c_void_p))  # allocation, offset, where the ranks' shares lie
_TENSORS = (POINTER(c_void_p), POINTER(c_uint64))  # addresses, sizes
_PIECES = (*_TENSORS, c_size_t, c_double, c_void_p)  # and how many, a factor, and where a flag is set
# A call can be made in two parts. BEGIN provides the data that other ranks read; REST does what waits for their data.
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
    "encode": (None, [c_void_p, c_size_t, c_int, c_size_t, c_void_p, c_void_p]),
    "decode": (None, [c_void_p, c_void_p, c_size_t, c_int, c_size_t, c_void_p, c_int]),
    "exchange": (c_int, [c_void_p, c_int, c_int, c_int, *_TENSORS, *_TENSORS, *_LOCATION, c_int64]),
}


@cache
def library() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none. Calls into it do not hold the interpreter's lock."""
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


def block_codec() -> tuple[Any, Any]:
    """Return the C functions that encode float32 as blocks of small integers and decode them.

    Raises:
        ConfigurationError: There is no C library.
    """
    loaded = library()
    if isinstance(loaded, str):
        raise ConfigurationError(f"Lockstep cannot compress to int8 and int4: {loaded}.\nOr use compression='bf16'.")
    return loaded.lockstep_encode, loaded.lockstep_decode


# The codes that the C library uses for kinds of calls, reductions and dtypes.

# The kinds of calls. The C library knows the first two and moves bytes for the others.
Kind = IntEnum("Kind", "ALL_REDUCE REDUCE_SCATTER BROADCAST ALL_GATHER GATHER SCATTER ALL_TO_ALL BARRIER EMPTY_SHARED")

# By code.
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_NAMES = "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 uint16 uint32 uint64"
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES.split())
# Of the dtypes that the C library computes with.
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

_OTHERS = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - set(DTYPES)
_ALL_DTYPES = (*DTYPES, *sorted(_OTHERS, key=str))
# Of all dtypes, which it can move.
ALL_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_ALL_DTYPES)}

# The kind of an exchange has the dtype's code, plus one, in its upper bits. The library moves bytes of any dtype, but
# it compares the kinds of all ranks, so a tensor never arrives with another dtype.
EXCHANGED_DTYPE = 2**8

# For bool tensors: a sum says whether any element is set. They have no mean.
_LOGICAL = {"sum": "max", "product": "min", "band": "min", "bor": "max", "min": "min", "max": "max", "bxor": "bxor"}

# What a call may be, if another rank makes another.
_HINTS = {
    "broadcast of uint8": "that of a model's buffers, which begins a forward of its wrapper: for a forward on one "
    "rank, call model.module.",
    "all_gather of int64": "lockstep.save, lockstep.load, consolidate_state_dict or another exchange of values of "
    "different sizes: call these on every rank, not behind `if rank == 0`.",
}


def describe(call: CallRecord) -> str:
    """Return the text for a call, such as ``all_reduce(sum) of 10 float32``."""
    moved_dtype, kind = divmod(call.kind, EXCHANGED_DTYPE)
    name, dtype_code = Kind(kind).name.lower(), moved_dtype - 1 if moved_dtype else call.dtype
    dtype = str(_ALL_DTYPES[dtype_code]).removeprefix("torch.")
    if kind == Kind.ALL_REDUCE:
        to = f" to rank {call.root} of the group" if call.root >= 0 else ""
        return f"{name}({REDUCTIONS[call.op]}) of {call.extent} {dtype}{to}"
    if kind == Kind.REDUCE_SCATTER:
        return f"{name}({REDUCTIONS[call.op]}) of {dtype}"
    dtype_text = "" if kind == Kind.BARRIER else f" of {dtype}"
    return f"{name}{dtype_text}" + (f" from or to rank {call.root} of the group" if call.root >= 0 else "")


@cache
def reduction_code(op: Any, dtype: torch.dtype) -> int:
    """Return the code of an operation, see `operation_of`, for tensors of ``dtype``.

    Raises:
        ConfigurationError: The dtype does not allow it, or the backend does not support it.
    """
    name = str(op).rpartition(".")[2].lower()
    if dtype == torch.bool:
        operations = _LOGICAL
    elif dtype.is_complex:
        operations = {operation: operation for operation in ("sum", "avg")}
    elif dtype not in DTYPE_CODES:
        raise ConfigurationError(
            f"The backend shm cannot reduce {dtype} tensors, only move them.\nConvert them before the call."
        )
    else:
        operations = {key: key for key in REDUCTIONS if key[0] != "b" or not dtype.is_floating_point}
    if name not in operations:
        raise ConfigurationError(
            f"The backend shm has no ReduceOp.{name.upper()} for {dtype}.\nIt has: {', '.join(operations).upper()}."
        )
    return REDUCTIONS.index(operations[name])


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor in a dtype that the C library knows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor


def operation_of(options: Any) -> Any:
    """Return the kind of ``ReduceOp`` in a c10d options object, or in the value that callers pass instead."""
    op = dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    return getattr(op, "op", op)


# How often a waiting rank reads a word before it sleeps, about 60 microseconds; 0 if ranks share cores. In training
# steps of 2 ranks, the first rank in a reduction usually waits for milliseconds, much longer than that. So step times
# with 0 to 8,000 reads differ by less than the noise; 30,000 made small models with ZeRO 12 % slower. With more ranks
# than cores, 200 reads gained nothing.
SPINS = 2000


def _interruptions(signals: list[BaseException]) -> Iterator[int]:
    """Yield 0 repeatedly, and 1 after a signal handler has raised; called while the main thread waits in C.

    It is a generator because handlers run as soon as Python code runs. A resumed generator continues inside its
    ``try``; a function would start outside of it.
    """
    while True:
        try:
            while True:
                yield 0
        except GeneratorExit:
            return
        except BaseException as error:  # KeyboardInterrupt, or an error of a handler: `call` raises it
            signals.append(error)
        yield 1


class Communicator:
    """One rank of a group that shares a segment.

    Attributes:
        native: The C library.
        handle: The library's handle of the group.
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
        self._signals: list[BaseException] = []
        self._broken: LockstepError | None = None
        # Not a method: the callback would keep this object, and so the mapping, until the next garbage collection.
        interruptions = _interruptions(self._signals)
        next(interruptions)
        self._callback = INTERRUPTED_TYPE(interruptions.__next__)  # kept alive: the C library holds only its address
        # With more ranks than cores, a rank that spins takes the core of the rank that it waits for.
        spins = SPINS if size <= len(os.sched_getaffinity(0)) else 0
        handle = native.lockstep_join(segment.address, segment.fd, rank, size, spins, self._callback)
        if handle is None:
            raise CollectiveError(f"Rank {rank} cannot join the shared segment: another process has this rank.")
        self.handle: int = handle
        self._joined = True
        # Another thread may interrupt the group when this one leaves it. A signal handler may do so inside of a method.
        self._lock = threading.RLock()

    def ensure_usable(self, operation: str) -> None:
        """Raise if the group cannot be used (any more).

        Raises:
            LockstepError: It failed before, was closed, or was created in another process.
        """
        me = self.ranks[self.rank]
        # A forked child has a copy of the object and shares the memory: its calls would count as this rank's.
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"Process {os.getpid()} was forked from rank {me} and calls {operation} on its group.\n"
                "A forked process is not a member of the group. Start processes that communicate with the spawn method."
            )
        if self._broken is not None:
            # A new exception, since a traceback grows each time that the same exception is raised.
            raise type(self._broken)(*self._broken.args) from self._broken
        if not self._joined:
            raise CollectiveError(f"Rank {me} calls {operation}, but has destroyed this process group already.")

    def call(self, operation: str, timeout_s: float, function: Callable[..., int], *args: object) -> None:
        """Call a collective of the C library. Collective: every rank. Blocks at most about ``timeout_s``.

        Raises:
            LockstepError: It failed. The group cannot be used any more, and the other ranks get the reason.
        """
        self.ensure_usable(operation)
        code = function(self.handle, *args, int(timeout_s * 1000))
        if code != OK:
            self._fail(code, operation, timeout_s)

    def have_all_begun(self, operation: str, patience_s: float) -> bool:
        """Return whether all ranks have begun the current call; wait at most ``patience_s`` for that."""
        code = self.native.lockstep_have_all_begun(self.handle, int(patience_s * 1000))
        if code not in (OK, TIMED_OUT):
            self._fail(code, operation, patience_s)
        return bool(code == OK)

    def _fail(self, code: int, operation: str, timeout_s: float) -> None:
        if code == INTERRUPTED:
            error = self._signals.pop()
            self.give_up(CollectiveError(f"Rank {self.ranks[self.rank]} was interrupted in {operation} on shm."))
            raise error
        failure = self._error_of(code, f"Rank {self.ranks[self.rank]} in {operation} on shm", timeout_s)
        self.give_up(failure)
        raise failure

    def _error_of(self, code: int, caller: str, timeout_s: float) -> CollectiveError:
        """Return the error for the library's return code; it names the ranks by their number in the whole job."""
        if code == STOPPED:
            return CollectiveError(f"{caller}: the group was closed in this process meanwhile.")
        if code == TIMED_OUT:
            # A bit for each missing rank, by its rank in this group.
            missing = self.native.lockstep_missing(self.handle)
            names = ", ".join(str(rank) for index, rank in enumerate(self.ranks) if missing >> index & 1)
            return CollectiveError(
                f"{caller} waited {timeout_s:g} s for rank {names}.\n"
                "That process is running, but is stopped, stuck or slow, or does not call as many collectives as the "
                "others. If it is only slow, pass a longer timeout when you create the group."
            )
        index = self.native.lockstep_failed_rank(self.handle)
        if code != MISMATCH:
            return self.peer_failure(code, caller, index)
        rank = self.ranks[index]
        local, remote = (describe(self.native.lockstep_call_of(self.handle, r).contents) for r in (self.rank, index))
        if local == remote:
            return CollectiveError(
                f"{caller}: rank {rank} sends a number of bytes that does not match this rank's buffer.\n"
                "The tensors must have the same shapes and dtypes on all ranks."
            )
        advice = "".join(
            f"\nThis {call} may be {hint}"
            for call, hint in _HINTS.items()
            if any(text.startswith(call) for text in (local, remote))
        )
        return CollectiveError(
            f"{caller}: the ranks call different collectives. This rank calls {local}; rank {rank} calls {remote}.\n"
            f"All ranks must call the same collectives in the same order, with the same shapes and dtypes.{advice}"
        )

    def peer_failure(self, code: int, caller: str, index: int) -> CollectiveError:
        """Return the error about rank ``index`` of the group, which will not take part any more."""
        rank = self.ranks[index]
        if code == DIED:
            return CollectiveError(
                f"{caller} waited for rank {rank}, whose process has ended.\n"
                f"It was killed, or failed first: look at the output of rank {rank}."
            )
        if code == WENT:
            return CollectiveError(
                f"{caller} waited for rank {rank}, which has left the group.\n"
                "It destroyed its process group before this call; all ranks must call the same collectives."
            )
        reason = (self.native.lockstep_reason(self.handle, index) or b"").decode(errors="replace")
        return CollectiveError(f"{caller} waited for rank {rank}, which gave up:\n{reason}")

    def give_up(self, reason: LockstepError) -> None:
        """Report to the other ranks that this one will not take part any more, and why."""
        with self._lock:
            if self._joined and self._broken is None:
                self._broken = reason
                # The shared memory has room for 500 bytes; the first lines name the rank and the cause.
                self.native.lockstep_fail(self.handle, str(reason).encode()[:500])

    def stop(self) -> None:
        """Make calls in other threads of this process return soon."""
        with self._lock:
            if self._joined:
                self.native.lockstep_stop(self.handle)

    def leave(self) -> None:
        """Leave the group. No thread may be in a call any more."""
        # Not in a forked child: its copy of this object ends with the child, and of the lock, which a thread may hold.
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._joined:
                self._joined = False
                self.native.lockstep_leave(self.handle)
                # Releases the lock that shows the other ranks that this process is alive.
                self._segment.close_file()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.leave()
