"""The state of a sharded optimizer as torch's format has it, put together from all ranks' shards and cut into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, gather_states
from lockstep.parallel.flat import flatten_like, view_like
from lockstep.parallel.zero.partition import Entries, Read, ShardRange, is_flat

# Names of numbers for the whole parameter; of use only where a parameter is one number itself.
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def gather_full_state(
    held: Iterable[tuple[ShardRange, Entries]],
    parameters: Sequence[Tensor],
    *,
    flat: bool,
    group: Group,
    to: int | None,
) -> dict[int, dict[str, Any]] | None:
    """Return what all ranks hold in torch's format, on the CPU, on rank ``to`` (None: on all); None on the others.

    Torch's format has by index of the parameter a dict with tensors of the parameter's shape and with numbers. A rank
    keeps elements of a parameter in the order in which they lie in memory (`ShardRange`): tensors of one dimension, and
    the numbers, which are the same for all elements. An optimizer that is not element-wise keeps entries as they are
    (``flat`` is False in the functions of this file), for whole parameters.

    Collective: every rank. Blocks.
    """
    mine = [
        [index, start, stop, {name: _to_cpu(value) for name, value in entries.items()}]
        for (index, start, stop, _), entries in held
    ]
    shards = gather_states(mine, group=group, device=parameters[0].device, to=to)
    if shards is None:
        return None
    state: dict[int, dict[str, Any]] = {}
    for index, start, stop, entries in sorted((each for rank in shards for each in rank), key=lambda each: each[0]):
        parameter, whole = parameters[index], state.setdefault(index, {})
        for name, value in entries.items():
            if not (flat and is_flat(value)):
                whole[name] = value
                continue
            if name not in whole:
                # In the memory order of the parameter, so that a shard is a slice of it.
                whole[name] = view_like(torch.empty(parameter.numel(), dtype=value.dtype), parameter)
            flatten_like(whole[name], parameter)[start:stop] = value
    return state


def read_from_full(state: Mapping[int, Entries], parameters: Sequence[Tensor], *, flat: bool) -> Read:
    """Return what reads ranges of elements from a state in torch's format."""

    def read(wanted: ShardRange) -> Entries | None:
        entries, parameter = state.get(wanted.parameter), parameters[wanted.parameter]
        if entries is None or not flat:
            return entries
        return {
            name: flatten_like(value, parameter)[wanted.start : wanted.stop]
            if isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() or name not in SCALARS)
            else value
            for name, value in entries.items()
        }

    return read


def _to_cpu(value: Any) -> Any:
    # a view would be sent with all the memory behind it
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
