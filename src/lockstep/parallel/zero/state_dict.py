"""The state of a sharded optimizer: as shards that any number of ranks can load, and whole, in torch's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.parallel.flat import view_like
from lockstep.parallel.zero.partition import SCALARS, ShardRange, lay_flat


class StateShard(TypedDict):
    """See [Note: formats]."""

    parameter: int
    start: int
    stop: int
    flat: bool
    entries: dict[str, Any]


class ShardedState(TypedDict):
    """What one rank saves.

    ``layout`` has the shape and the strides of every parameter, since pieces are cut from memory.
    """

    rank: int
    world_size: int
    layout: list[list[list[int]]]
    param_groups: list[dict[str, Any]]
    pieces: list[StateShard]


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
    layout = [[list(each.shape), list(each.stride())] for each in parameters]
    if any(state["layout"] != layout for state in given):
        raise ConfigurationError(
            "The sharded state is of parameters with other shapes or another memory format.\n"
            "Use the model that it was saved with, or save whole: consolidate_state_dict() and state_dict()."
        )
    return given


def make_state_shards(state: Iterable[tuple[ShardRange, Mapping[str, Any]]], *, flat: bool) -> list[StateShard]:
    """Return what a shard keeps as pieces, on the CPU, without more memory than they need."""
    return [
        StateShard(
            parameter=span.parameter,
            start=span.start,
            stop=span.stop,
            flat=flat,
            entries={name: _to_cpu(value) for name, value in entries.items()},
        )
        for span, entries in state
    ]


class ShardedEntries:
    """The pieces of all shards of one optimizer.

    Args:
        pieces: In any order, of any number of shards.
        parameters: What they belong to, by index.
    """

    def __init__(self, pieces: Iterable[StateShard], parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._pieces: dict[int, list[StateShard]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece["parameter"], []).append(piece)
        for each in self._pieces.values():
            each.sort(key=lambda piece: piece["start"])

    def read(self, span: ShardRange) -> dict[str, Any] | None:
        """Return what was kept of the elements of ``span``; None: nothing.

        Raises:
            ConfigurationError: Only of a part of them something is here.
        """
        pieces = self._pieces.get(span.parameter)
        if pieces is None:
            return None
        if not pieces[0]["flat"]:
            return pieces[0]["entries"]
        parts = [piece for piece in pieces if piece["start"] < span.stop and piece["stop"] > span.start]
        cuts = [(max(span.start, piece["start"]), min(span.stop, piece["stop"])) for piece in parts]
        if sum(stop - start for start, stop in cuts) != span.numel:
            raise ConfigurationError(
                f"The state of parameter {span.parameter} is not whole: pieces of it are missing, or there twice.\n"
                "Give the states of all ranks that saved, each once."
            )
        entries: dict[str, Any] = {}
        for name, value in parts[0]["entries"].items():
            entries[name] = value
            if isinstance(value, Tensor) and value.dim() == 1:
                cut = zip(parts, cuts, strict=True)
                entries[name] = torch.cat(
                    [part["entries"][name][first - part["start"] : last - part["start"]] for part, (first, last) in cut]
                )
        return entries

    def whole(self) -> dict[int, dict[str, Any]]:
        """Return the state in torch's format, by index."""
        state = {}
        for index in sorted(self._pieces):
            parameter = self._parameters[index]
            entries = self.read(ShardRange(index, 0, 0, parameter.numel()))
            assert entries is not None
            if self._pieces[index][0]["flat"]:
                entries = {
                    name: view_like(value, parameter) if isinstance(value, Tensor) and value.dim() == 1 else value
                    for name, value in entries.items()
                }
            state[index] = entries
        return state


class FullEntries:
    """A state in torch's format.

    Args:
        state: By index.
        parameters: What it belongs to, by index.
        flat: Whether `read` returns flat elements, or all of a parameter's entries as they are.
    """

    def __init__(self, state: Mapping[int, Mapping[str, Any]], parameters: Sequence[Tensor], *, flat: bool) -> None:
        self._state, self._parameters, self._flat = state, parameters, flat

    def read(self, span: ShardRange) -> Mapping[str, Any] | None:
        """Return what was kept of the elements of ``span``; None: nothing."""
        entries = self._state.get(span.parameter)
        if entries is None or not self._flat:
            return entries
        parameter = self._parameters[span.parameter]
        return {
            name: lay_flat(value, parameter)[span.start : span.stop] if _is_like(name, value, parameter) else value
            for name, value in entries.items()
        }


def _is_like(name: str, value: object, parameter: Tensor) -> bool:
    """Whether ``value`` has a number for each element of ``parameter``."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() > 0 or name not in SCALARS)


def _to_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # a view would be saved with all the memory behind it
    return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
