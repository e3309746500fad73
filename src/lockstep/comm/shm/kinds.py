"""The numbers under which operations, reductions and dtypes go into the C library."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.library import Call
from lockstep.errors import ConfigurationError

ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, BARRIER, ALLOCATE = range(1, 10)
KINDS = {
    ALL_REDUCE: "all_reduce",
    REDUCE_SCATTER: "reduce_scatter",
    BROADCAST: "broadcast",
    ALL_GATHER: "all_gather",
    GATHER: "gather",
    SCATTER: "scatter",
    ALL_TO_ALL: "all_to_all",
    BARRIER: "barrier",
    ALLOCATE: "empty_shared",
}
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
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_LOGICAL = {"sum": "max", "product": "min", "band": "min", "bor": "max", "min": "min", "max": "max", "bxor": "bxor"}


def describe(call: Call) -> str:
    """Return a call in words, such as ``all_reduce(sum) of 10 float32``."""
    name = KINDS.get(call.kind, f"operation {call.kind}")
    if call.kind == ALL_REDUCE:
        to = f" to rank {call.root} of the group" if call.root >= 0 else ""
        return f"{name}({REDUCTIONS[call.op]}) of {call.extent} {_dtype_name(call.dtype)}{to}"
    if call.kind == REDUCE_SCATTER:
        return f"{name}({REDUCTIONS[call.op]}) of {_dtype_name(call.dtype)}"
    return f"{name} from or to rank {call.root} of the group" if call.root >= 0 else str(name)


def _dtype_name(number: int) -> str:
    return str(DTYPES[number]).removeprefix("torch.")


def reduction_of(op: Any, dtype: torch.dtype) -> int:
    """Return the number of a ``ReduceOp`` for tensors of ``dtype``.

    Raises:
        ConfigurationError: It makes no sense for that dtype, or the backend does not have it.
    """
    return _reduction_of(getattr(op, "op", op), dtype)


@cache
def _reduction_of(op: Any, dtype: torch.dtype) -> int:
    name = str(op).rpartition(".")[2].lower()
    if name not in REDUCTIONS:
        raise ConfigurationError(f"The backend shm has no reduction {name!r}.\nIt has: {', '.join(REDUCTIONS)}.")
    if dtype not in NUMBERS and dtype != torch.bool and not dtype.is_complex:
        raise ConfigurationError(
            f"The backend shm cannot reduce {dtype} tensors, only move them.\nConvert them before the call."
        )
    if dtype == torch.bool:
        if name == "avg":
            raise ConfigurationError("The mean of bool tensors makes no sense.\nPass a float tensor.")
        return REDUCTIONS.index(_LOGICAL[name])
    is_float = dtype.is_floating_point or dtype.is_complex
    if name == "avg" and not is_float:
        raise ConfigurationError(f"The mean of {dtype} tensors makes no sense.\nPass a float tensor, or use SUM.")
    if name in ("band", "bor", "bxor") and is_float:
        raise ConfigurationError(f"ReduceOp.{name.upper()} makes no sense for {dtype}.\nPass an integer tensor.")
    if dtype.is_complex and name not in ("sum", "avg"):
        raise ConfigurationError(f"Complex numbers can be summed and averaged, but ReduceOp.{name.upper()} cannot be.")
    return REDUCTIONS.index(name)


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor in a dtype that the C library knows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor


def dtype_number(dtype: torch.dtype) -> int:
    """Return the number of a dtype that `as_numbers` gives."""
    return NUMBERS[dtype]


def operation_of(options: Any) -> Any:
    """Return the ``ReduceOp`` of a c10d options object, or of what callers pass in its place."""
    if options is None:
        return dist.ReduceOp.SUM
    return getattr(options, "reduceOp", options)
