"""The arguments of c10d's calls: all overloads of torch in one form, and what one rank alone can refuse."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.communicator import operation_of
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
_Wanted = Callable[[Sequence[Tensor], int], Sequence[Sequence[Tensor]]]
_like_first: _Wanted = lambda singles, size: [[singles[0]] * len(singles)]  # noqa: E731
_like_itself: _Wanted = lambda singles, size: [[single] for single in singles]  # noqa: E731
_TENSORS, _PAIR = ("tensor",), ("output", "input")
# By call: what torch calls its data, without endings; the options; and what its lists are compared with. That is made
# of its ``singles``: the outputs or inputs that have no tensor for each rank, or all its tensors.
_SIGNATURES: dict[str, tuple[Sequence[str], Any, _Wanted]] = {
    "allreduce": (_TENSORS, _c10d.AllreduceOptions, _like_first),
    "allreduce_coalesced": (_TENSORS, _c10d.AllreduceCoalescedOptions, _like_first),
    "broadcast": (_TENSORS, _c10d.BroadcastOptions, _like_first),
    "reduce": (_TENSORS, _c10d.ReduceOptions, _like_first),
    "gather": (_PAIR, _c10d.GatherOptions, lambda singles, size: [[*singles] * size]),
    "scatter": (_PAIR, _c10d.ScatterOptions, lambda singles, size: [[*singles] * size]),
    "allgather": (_PAIR, _c10d.AllgatherOptions, lambda singles, size: [[*singles] * size] * len(singles)),
    "allgather_coalesced": (_PAIR, _c10d.AllgatherOptions, lambda singles, size: [singles] * size),
    "all_gather_single": (_PAIR, _c10d.AllgatherOptions, _like_itself),
    "all_gather_single_coalesced": (_PAIR, _c10d.AllgatherOptions, _like_itself),
    "reduce_scatter": (_PAIR, _c10d.ReduceScatterOptions, lambda singles, size: [[item] * size for item in singles]),
    "reduce_scatter_single": (_PAIR, _c10d.ReduceScatterOptions, _like_itself),
    "reduce_scatter_single_coalesced": (_PAIR, _c10d.ReduceScatterOptions, _like_itself),
    "alltoall": (_PAIR, _c10d.AllToAllOptions, lambda singles, size: [[singles[0]] * size] * 2),
    "all_to_all_single": ((*_PAIR, "output_split", "input_split"), _c10d.AllToAllOptions, _like_itself),
    "barrier": ((), _c10d.BarrierOptions, _like_itself),
    "send": (("tensor", "dst", "tag"), None, _like_first),
    "recv": (("tensor", "src", "tag"), None, _like_first),
    "recv_anysource": (("tensor", "tag"), None, _like_first),
}
_ANY_SIZES = ("allreduce_coalesced", "alltoall", "all_to_all_single")
CALLS = (*_SIGNATURES, *NEW_NAMES)
# What overloads take in place of options that have these fields, in this order.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def bind(call: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return a call's data, as lists, and its options (None: it has none), whichever of torch's overloads is used.

    Raises:
        TypeError: No overload takes these arguments.
    """
    call = NEW_NAMES.get(call, call)
    names, options, _ = _SIGNATURES[call]
    data, extra = list(args[: len(names)]), list(args[len(names) :])
    for name in names[len(data) :]:
        data += [kwargs.pop(key) for key in sorted(kwargs) if key.startswith(name)][:1]
    opts = extra.pop(0) if options and extra and isinstance(extra[0], options) else kwargs.pop("opts", None)
    opts = options() if opts is None and options else opts
    if extra or kwargs or len(data) < len(names):
        settings = {name: field for name, field in _FIELDS.items() if hasattr(opts, field)}
        kwargs.update(zip(settings, extra, strict=False))
        if len(data) < len(names) or len(extra) > len(settings) or not kwargs.keys() <= settings.keys():
            raise TypeError(f"{call}() takes {(*names, 'opts', *settings)}; got also or not all: {extra} {kwargs}")
        for name in [name for name in kwargs if kwargs[name] is not None]:  # None is torch's default for a timeout
            setattr(opts, settings[name], kwargs[name])
    # Of the lists in an overload with one tensor, the other one is a row for this tensor.
    if "single" not in call and any(isinstance(argument, Tensor) for argument in data):
        data = [argument if isinstance(argument, int) else [argument] for argument in data]
    return data, opts


def check(call: str, data: Sequence[Any], opts: Any, rank: int, ranks: Sequence[int]) -> None:
    """Refuse what this rank alone can see is wrong, as Gloo does. Nothing was exchanged, so the group stays usable.

    ``call`` is a new name, and the others are what `bind` returned; ``ranks`` are the members' ranks in the whole job.

    Raises:
        ConfigurationError: No rank has the root, or the tensors do not fit the call, or each other.
    """
    for problem in _problems(call, data, opts, rank, len(ranks)):
        raise ConfigurationError(f"Rank {ranks[rank]} in {call}: {problem}.\nNothing was sent; the group stays usable.")


def _problems(call: str, data: Sequence[Any], opts: Any, rank: int, size: int) -> Iterator[str]:
    """Yield what is wrong. What follows the first problem may rely on it being absent."""
    root = data[1] if call in ("send", "recv") else getattr(opts, "rootRank", 0)
    if not 0 <= root < size:
        yield f"invalid root rank or peer {root}: this group has ranks 0 to {size - 1}"
    if call in ("broadcast", "reduce") and not 0 <= opts.rootTensor < len(data[0]):
        yield f"invalid root tensor {opts.rootTensor} of {len(data[0])}"
    singles, lists, single_side, side = data[0] if data else [], data[:1], "", ""
    if "scatter" in call:
        singles, lists, single_side, side = *data, "output ", "input "
    elif "gather" in call or "all_to_all" in call:
        lists, singles, side, single_side = *data[:2], "output ", "input "
    if is_flat := "single" in call or not data:
        singles, lists = ([tensors] if isinstance(tensors, Tensor) else tensors for tensors in (singles, lists))
        lists = [[tensor] for tensor in lists]
    has_root = call in ("gather", "scatter")
    length = "a single-element" if has_root or call in ("reduce", "send", "recv", "recv_anysource") else "non-empty"
    if not (singles or is_flat) or (len(singles) > 1 and length != "non-empty"):
        yield f"requires {length} {single_side}tensor list; it has {len(singles)}"
    wanted, count = _SIGNATURES[call][2](singles, size), "requires input/output tensor lists to have the same length"
    if has_root and rank != root:
        lists, wanted, count = [row for row in lists if row], [], f"requires empty {side}on non-root"
    elif has_root:
        count = f"requires {length} {side}list"
    elif call == "allgather_coalesced":
        count = "output lists should be equal to world size"
    elif call == "alltoall":
        lists = data
    if len(lists) != len(wanted):
        yield f"{count}; there are {len(lists)} instead of {len(wanted)}"
    layout = torch.sparse_coo if call == "allreduce" and singles[0].is_sparse else torch.strided
    if layout == torch.sparse_coo and "SUM" not in str(operation_of(opts)):
        yield "unsupported reduction operation: sparse tensors can only be summed"
    for index, tensor in enumerate((*singles, *chain.from_iterable(lists))):
        if not tensor.is_cpu:
            yield f"shm moves only CPU tensors; use init_process_group('cpu:gloo,{tensor.device.type}:...')"
        if tensor.layout != layout:
            yield f"invalid tensor layout at index {index}: unsupported layout {tensor.layout}, expected {layout}"
    for number, (row, likes) in enumerate(zip(lists, wanted, strict=True)):
        if len(row) != len(likes):
            sizes = f"Incorrect {side}list size {len(row)}. {side.capitalize()}list size should be {len(likes)}"
            yield f"invalid {side}tensor list at index {number}. {sizes}"
        for index, (tensor, like) in enumerate(zip(row, likes, strict=True)):
            if tensor.dtype != like.dtype:
                yield f"invalid tensor type at index {index}: tensors must all have the same type ({like.dtype})"
            # A flat tensor with a part for each rank may have any shape.
            has, needs = (tensor.numel(), like.numel() * size) if is_flat else (tuple(tensor.shape), tuple(like.shape))
            if has != needs and not (call in _ANY_SIZES or (call == "reduce_scatter" and index != rank)):
                yield f"invalid tensor size: invalid size of {side}tensor at index {index} ({has}, not {needs})"
