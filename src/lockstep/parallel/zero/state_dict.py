"""The state of a sharded optimizer: in shards that any number of ranks can load, and full, in torch's format.

[Note: formats]
*Full* is torch's: by index of the parameter, a dict with tensors of the parameter's shape and with numbers. A *state
shard* holds elements ``start`` to ``stop`` of one parameter, in the order in which they lie in memory: tensors of one
dimension, and the numbers, which are the same in all shards of a parameter. An optimizer that is not element-wise keeps
one shard for each parameter, whose entries are as they are (``flat`` is False).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.parallel.flat import flatten_like, view_like
from lockstep.parallel.zero.partition import ShardRange

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of numbers for the whole parameter; of use only where a parameter is one number itself."""


class StateShard(TypedDict):
    """See [Note: formats]."""

    parameter: int
    start: int
    stop: int
    flat: bool
    entries: dict[str, Any]


class ShardedState(TypedDict):
    """What one rank saves.

    ``layout`` has the shape and the strides of every parameter, since shards are cut from memory.
    """

    rank: int
    world_size: int
    layout: list[list[list[int]]]
    param_groups: list[dict[str, Any]]
    pieces: list[StateShard]


def layout_of(parameters: Sequence[Tensor]) -> list[list[list[int]]]:
    """Return shape and strides of every parameter."""
    return [[list(each.shape), list(each.stride())] for each in parameters]


def check_shards(states: Iterable[Mapping[str, Any]], parameters: Sequence[Tensor]) -> list[Mapping[str, Any]]:
    """Return the states by rank, if they are of all ranks that saved, and of these parameters.

    Raises:
        ConfigurationError: They are not.
    """
    given = sorted(states, key=lambda state: int(state["rank"]))
    if not given:
        raise ConfigurationError("There are no states to load.\nGive what sharded_state_dict() returned on every rank.")
    ranks, num_ranks = [state["rank"] for state in given], given[0]["world_size"]
    if ranks != list(range(num_ranks)):
        raise ConfigurationError(
            f"{num_ranks} ranks saved a sharded state, but those given are of ranks {', '.join(map(str, ranks))}.\n"
            "Give the states of all of them, each once."
        )
    if any(state["layout"] != layout_of(parameters) for state in given):
        raise ConfigurationError(
            "The sharded state is of parameters with other shapes or another memory format.\n"
            "Use the model that it was saved with, or save whole: consolidate_state_dict() and state_dict()."
        )
    return given


def copy_to_cpu(state: Iterable[tuple[ShardRange, Mapping[str, Any]]], *, flat: bool) -> list[StateShard]:
    """Return what an optimizer keeps as state shards on the CPU, without more memory than they need."""
    return [
        StateShard(
            parameter=each.parameter,
            start=each.start,
            stop=each.stop,
            flat=flat,
            entries={name: _to_cpu(value) for name, value in entries.items()},
        )
        for each, entries in state
    ]


def shards_of_full(
    state: Mapping[int, Mapping[str, Any]], parameters: Sequence[Tensor], *, flat: bool
) -> list[StateShard]:
    """Return a state in torch's format as state shards, one for each parameter."""
    shards = []
    for index, entries in state.items():
        parameter = parameters[index]
        laid = {
            name: flatten_like(value, parameter) if flat and _is_like(name, value, parameter) else value
            for name, value in entries.items()
        }
        shards.append(StateShard(parameter=index, start=0, stop=parameter.numel(), flat=flat, entries=laid))
    return shards


class StateReader:
    """The state shards of all ranks together.

    Args:
        shards: In any order, of any number of ranks.
        parameters: What they belong to, by index.
    """

    def __init__(self, shards: Iterable[StateShard], parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._shards: dict[int, list[StateShard]] = {}
        for shard in sorted(shards, key=lambda shard: shard["start"]):
            self._shards.setdefault(shard["parameter"], []).append(shard)

    def read(self, wanted: ShardRange) -> dict[str, Any] | None:
        """Return what was kept of these elements; None: nothing.

        Raises:
            ConfigurationError: Only of a part of them something is here.
        """
        shards = self._shards.get(wanted.parameter)
        if shards is None:
            return None
        if not shards[0]["flat"]:
            return shards[0]["entries"]
        parts = [shard for shard in shards if shard["start"] < wanted.stop and shard["stop"] > wanted.start]
        cuts = [
            slice(max(wanted.start - shard["start"], 0), min(wanted.stop, shard["stop"]) - shard["start"])
            for shard in parts
        ]
        if sum(cut.stop - cut.start for cut in cuts) != wanted.numel:
            raise ConfigurationError(
                f"The state of parameter {wanted.parameter} is not whole: pieces of it are missing, or there twice.\n"
                "Give the states of all ranks that saved, each once."
            )
        return {
            name: torch.cat([part["entries"][name][cut] for part, cut in zip(parts, cuts, strict=True)])
            if _is_flat(value)
            else value
            for name, value in parts[0]["entries"].items()
        }

    def full(self) -> dict[int, dict[str, Any]]:
        """Return the state in torch's format, by index."""
        state = {}
        for index in sorted(self._shards):
            parameter = self._parameters[index]
            entries = self.read(ShardRange(index, 0, parameter.numel()))
            assert entries is not None
            if self._shards[index][0]["flat"]:
                entries = {
                    name: view_like(value, parameter) if _is_flat(value) else value for name, value in entries.items()
                }
            state[index] = entries
        return state


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _is_like(name: str, value: object, parameter: Tensor) -> bool:
    """Return whether ``value`` has a number for each element of ``parameter``."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() > 0 or name not in SCALARS)


def _to_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # a view would be saved with all the memory behind it
    return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
