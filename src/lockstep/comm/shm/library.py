"""Load the C library that the ranks wait with; it is built with the package where it can be."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

INTERRUPTED_TYPE = ctypes.CFUNCTYPE(c_int)
MAX_RANKS = 64
OK, TIMED_OUT, DIED, WENT, BROKEN, MISMATCH, INTERRUPTED, STOPPED = range(8)


class Call(ctypes.Structure):
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


_SIGNATURES = {
    "segment_bytes": (c_size_t, [c_int, c_size_t, c_size_t]),
    "format": (None, [c_void_p, c_size_t, c_size_t]),
    "join": (c_void_p, [c_void_p, c_int, c_int, c_int, c_int, INTERRUPTED_TYPE]),
    "fail": (None, [c_void_p, c_char_p]),
    "stop": (None, [c_void_p]),
    "leave": (None, [c_void_p]),
    "culprit": (c_int, [c_void_p]),
    "missing": (c_uint64, [c_void_p]),
    "reason": (c_char_p, [c_void_p, c_int]),
    "call_of": (POINTER(Call), [c_void_p, c_int]),
    "look": (c_int, [c_void_p, c_int]),
    "bell": (c_uint32, [c_void_p]),
    "ring_bell": (None, [c_void_p, c_int]),
    "await_bell": (None, [c_void_p, c_uint32, c_int64]),
    "ring_write": (c_size_t, [c_void_p, c_int, c_void_p, c_size_t]),
    "ring_read": (c_size_t, [c_void_p, c_int, c_void_p, c_size_t]),
    "all_reduce": (
        c_int,
        [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int64, c_size_t, POINTER(c_void_p), c_int64],
    ),
    "reduce_scatter": (
        c_int,
        [
            c_void_p,
            POINTER(c_void_p),
            POINTER(c_uint64),
            c_void_p,
            c_int,
            c_int,
            c_int64,
            c_size_t,
            POINTER(c_void_p),
            c_int64,
        ],
    ),
    "exchange": (
        c_int,
        [
            c_void_p,
            c_int,
            c_int,
            c_int,
            POINTER(c_void_p),
            POINTER(c_uint64),
            POINTER(c_void_p),
            POINTER(c_uint64),
            c_int64,
            c_size_t,
            POINTER(c_void_p),
            c_int64,
        ],
    ),
}


@cache
def library() -> ctypes.CDLL | str:
    """Return the library, or why there is none. Calls into it do not hold the interpreter's lock."""
    if sys.platform != "linux":
        return f"it is written for Linux, not for {sys.platform}"
    spec = importlib.util.find_spec("lockstep.comm.shm._native")
    if spec is None or spec.origin is None:
        return "its C library was not built when lockstep was installed; install a C compiler and lockstep again"
    try:
        loaded = ctypes.CDLL(spec.origin)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"lockstep_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"its C library cannot be loaded: {error}"
    return loaded
