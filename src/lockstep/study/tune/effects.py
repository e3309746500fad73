"""What a change of settings does to the training: nothing, rounding, or something that one has to allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from lockstep.study.tune.values import differences, num_shares, strategy_of, value_of

_BITS = {"workers", "prefetch"}
"""Samples and random numbers depend on the position only, whoever loads them."""

_ARITHMETIC = {"precision", "wire"}
_RUN = {"global_batch_size", "seed", "lr_scaling", "warmup", "schedule", "clip"}


class Effect(IntEnum):
    """From least to most."""

    BITS = 0
    ROUNDING = 1
    DIVISION = 2
    ARITHMETIC = 3
    RUN = 4

    @property
    def words(self) -> str:
        """What becomes of the training."""
        return {
            Effect.BITS: "same bits",
            Effect.ROUNDING: "rounding",
            Effect.DIVISION: "division",
            Effect.ARITHMETIC: "arithmetic",
            Effect.RUN: "another run",
        }[self]


def effect_of(
    before: Mapping[str, Any], after: Mapping[str, Any], *, num_devices: int, split_layers: Sequence[str]
) -> Effect:
    """Return what becomes of a training if its settings change.

    Args:
        before: Settings by name.
        after: Likewise.
        num_devices: That take part.
        split_layers: Kinds of layer whose result depends on how a batch is divided, see `compare.race.split_layers`.
    """
    names = differences(before, after)
    found = {_of(name) for name in names}
    if split_layers and ("strategy" in names or "accumulate" in names):
        # The replicas of dp draw dropout from one generator on CPUs, so the same division is not enough there.
        unlike = _division(before, num_devices) != _division(after, num_devices)
        threaded = "dropout" in split_layers and _is_threaded(before) != _is_threaded(after)
        found |= {Effect.DIVISION} if unlike or threaded else set()
    return max(found, default=Effect.BITS)


def _of(name: str) -> Effect:
    if name in _BITS:
        return Effect.BITS
    if name in _ARITHMETIC:
        return Effect.ARITHMETIC
    return Effect.RUN if name in _RUN else Effect.ROUNDING


def _division(values: Mapping[str, Any], num_devices: int) -> tuple[int, int]:
    return num_shares(values, num_devices), value_of(values, "accumulate")


def _is_threaded(values: Mapping[str, Any]) -> bool:
    return strategy_of(values).startswith("dp")
