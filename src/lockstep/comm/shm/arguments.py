"""The arguments of c10d's calls: all overloads of torch in one form, and what one rank alone can refuse."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.communicator import operation_of
from lockstep.containers import find_tensors
from lockstep.errors import ConfigurationError

_c10d = dist.distributed_c10d
# What torch called them before 2.13.
NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
_PAIR = ("output", "input")
# By call: what torch calls its data, without endings; the options; and what overloads take in place of options.
_SIGNATURES: dict[str, tuple[Sequence[str], Any, Sequence[str]]] = {
    "allreduce": (["tensor"], _c10d.AllreduceOptions, ["op", "timeout"]),
    "allreduce_coalesced": (["tensor"], _c10d.AllreduceCoalescedOptions, []),
    "broadcast": (["tensor"], _c10d.BroadcastOptions, ["root", "timeout"]),
    "reduce": (["tensor"], _c10d.ReduceOptions, ["root", "op", "timeout"]),
    "gather": (_PAIR, _c10d.GatherOptions, ["root", "timeout"]),
    "scatter": (_PAIR, _c10d.ScatterOptions, ["root", "timeout"]),
    "alltoall": (_PAIR, _c10d.AllToAllOptions, []),
    "all_to_all_single": ([*_PAIR, "output_split", "input_split"], _c10d.AllToAllOptions, ["timeout"]),
    "barrier": ([], _c10d.BarrierOptions, ["timeout"]),
    "send": (["tensor", "dst", "tag"], None, []),
    "recv": (["tensor", "src", "tag"], None, []),
    "recv_anysource": (["tensor", "tag"], None, []),
}
for _call in ("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"):
    _SIGNATURES[_call] = (_PAIR, _c10d.AllgatherOptions, ["timeout"])
for _call in ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"):
    _SIGNATURES[_call] = (_PAIR, _c10d.ReduceScatterOptions, ["op", "timeout"])
CALLS = (*_SIGNATURES, *NEW_NAMES)
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def bind(call: str, args: Sequence[Any], given: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return a call's data, as lists, and its options (None: it has none), whichever of torch's overloads is used.

    Raises:
        TypeError: No overload takes these arguments.
    """
    call = NEW_NAMES.get(call, call)
    names, options, settings = _SIGNATURES[call]
    data, rest = list(args[: len(names)]), list(args[len(names) :])
    for name in names[len(data) :]:
        data += [given.pop(key) for key in sorted(given) if key.startswith(name)][:1]
    opts = rest.pop(0) if options and rest and isinstance(rest[0], options) else given.pop("opts", None)
    given.update(zip(settings, rest, strict=False))
    if len(data) < len(names) or len(rest) > len(settings) or not given.keys() <= set(settings):
        raise TypeError(f"{call}() takes {', '.join([*names, 'opts', *settings])}; got also or not all: {rest} {given}")
    # Of the lists in an overload with one tensor, the other one is a row for this tensor.
    if "single" not in call and any(isinstance(each, Tensor) for each in data):
        data = [each if isinstance(each, int) else [each] for each in data]
    if opts is None and options:
        opts = options()
    for name, value in given.items():
        if value is not None:  # torch's default for a timeout
            setattr(opts, _FIELDS[name], value)
    return data, opts


def check(call: str, data: Sequence[Any], opts: Any, rank: int, ranks: Sequence[int]) -> None:
    """Refuse what this rank alone can see is wrong, as Gloo does. Nothing was exchanged, so the group stays usable.

    ``call`` is a new name, and the others are what `bind` returned; ``ranks`` are the members' ranks in the whole job.

    Raises:
        ConfigurationError: No rank has the root, or the tensors do not fit the call, or each other.
    """
    for problem in _problems(call, data, opts, rank, len(ranks)):
        raise ConfigurationError(
            f"Rank {ranks[rank]} in {call}: {problem}.\nIt has sent nothing; the group stays usable."
        )


def _problems(call: str, data: Sequence[Any], opts: Any, rank: int, size: int) -> Iterator[str]:
    """Yield what is wrong. What follows the first problem may rely on it being absent."""
    root = data[1] if call in ("send", "recv") else getattr(opts, "rootRank", 0)
    if not 0 <= root < size:
        yield f"invalid root rank or peer {root}: this group has ranks 0 to {size - 1}"
    if call in ("broadcast", "reduce") and not 0 <= opts.rootTensor < len(data[0]):
        yield f"invalid root tensor {opts.rootTensor} of {len(data[0])}"
    tensors = list(find_tensors(data))
    layout = torch.sparse_coo if call == "allreduce" and tensors and tensors[0].is_sparse else torch.strided
    for index, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            other = f"use init_process_group('cpu:gloo,{tensor.device.type}:...')"
            yield f"the backend shm moves CPU tensors, but this one is on {tensor.device}; {other}"
        if tensor.layout != layout:
            yield f"invalid tensor layout at index {index}: unsupported layout {tensor.layout}, expected {layout}"
        like = tensors[-1 if len(data) == 2 else 0]  # an input
        if tensor.dtype != like.dtype and "single_coalesced" not in call:
            both = f"expected {like.dtype}, got {tensor.dtype}"
            yield f"invalid tensor type at index {index} ({both}); tensors must all have the same type"
    if layout == torch.sparse_coo and "SUM" not in str(operation_of(opts)):
        yield "unsupported reduction operation: sparse tensors can only be summed"
    if call.startswith("allreduce") and not tensors:
        yield "requires non-empty tensor list"
    if call in ("reduce", "send", "recv", "recv_anysource") and len(data[0]) != 1:
        yield f"requires a single-element tensor list; it has {len(data[0])}"
    if call in ("allreduce", "broadcast"):
        yield from _other_sizes("tensor", tensors, tensors[0])
    if call == "alltoall" and not len(data[0]) == len(data[1]) == size:
        yield f"requires {size} input and output tensors, one for each rank"
    if "gather" in call or "scatter" in call:
        # The outputs or the inputs have a part for each rank.
        names, sides = (_PAIR, data) if "gather" in call else (_PAIR[::-1], data[::-1])
        if "single" in call:
            wholes, parts = sides if "coalesced" in call else [[each] for each in sides]
            yield from _unequal_parts(wholes, parts, size)
        else:
            yield from _wrong_rows(call, names, sides[0], sides[1], rank, root, size)


def _other_sizes(what: str, tensors: Sequence[Tensor], like: Tensor) -> Iterator[str]:
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape:
            sizes = f"expected {tuple(like.shape)}, got {tuple(tensor.shape)}"
            yield f"invalid tensor size: invalid size of {what} at index {index} ({sizes})"


def _unequal_parts(wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> Iterator[str]:
    """Compare tensors with a part for each rank with tensors that are one part."""
    if len(wholes) != len(parts):
        yield "requires input/output tensor lists to have the same length"
    for whole, part in zip(wholes, parts, strict=True):
        if whole.dtype != part.dtype or whole.numel() != part.numel() * size:
            yield (
                f"the large tensor must have {size} times as many elements as the small one, one part for each rank, "
                f"and its dtype; they have {whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}"
            )


def _wrong_rows(
    call: str, names: Sequence[str], rows: Sequence[Any], singles: Sequence[Tensor], rank: int, root: int, size: int
) -> Iterator[str]:
    """Compare lists with a tensor for each rank with single tensors."""
    has_root = call in ("gather", "scatter")
    if not singles or (has_root and len(singles) > 1):
        count = "a single-element" if has_root else "non-empty"
        yield f"requires {count} {names[1]} tensor list; it has {len(singles)}"
    if has_root and rank != root:
        if any(rows):
            yield f"requires empty {names[0]} on non-root"
        return
    if call == "allgather_coalesced":
        if len(rows) != size:
            yield f"output lists should be equal to world size {size}; there are {len(rows)}"
        if any(len(row) != len(singles) for row in rows):
            yield f"requires {len(singles)} tensors in each output list, one for each input"
        rows = list(zip(*rows, strict=True))  # in the list of another call these are the rows
    if len(rows) != len(singles):
        same = "input/output tensor lists to have the same length"
        yield f"requires {f'a single-element {names[0]} list' if has_root else same}; it has {len(rows)}"
    length = size * len(singles) if call == "allgather" else size
    for index, (row, single) in enumerate(zip(rows, singles, strict=True)):
        if len(row) != length:
            yield (
                f"invalid {names[0]} tensor list at index {index}. Incorrect {names[0]} list size {len(row)}. "
                f"{names[0].title()} list size should be {length}"
            )
        if call == "allgather":
            row, single = (*row, single), singles[0]
        yield from _other_sizes(f"{names[0]} tensor", [row[rank]] if call == "reduce_scatter" else row, single)
