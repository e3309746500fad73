"""Settings as plain values: those that differ from the defaults, by name, as a file of settings has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lockstep.study.compare.benchmark import threads_of
from lockstep.train.plan import PER_PROCESS
from lockstep.train.settings import FitSettings, Settings, StrategyName

Values = dict[str, Any]

_DEFAULTS = {field.name: field.default for field in fields(FitSettings)}
_OF_LOOP = {field.name for field in fields(Settings)}

MANY_STEPS = 1_000_000
"""More than anybody waits for: a stream needs a number, and a schedule falls over it."""


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting, given or not."""
    return values.get(name, _DEFAULTS[name])


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """Return ``values`` with ``changes``; what is as ever is left out."""
    together = {**values, **changes}
    return {name: value for name, value in together.items() if value != _DEFAULTS[name]}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Values:
    """Return what ``after`` changes, with the defaults spelled out."""
    names = sorted({*before, *after}, key=list(_DEFAULTS).index)
    return {name: value_of(after, name) for name in names if value_of(after, name) != value_of(before, name)}


def loop_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a loop that goes on for as long as it is asked to."""
    own = {name: value for name, value in values.items() if name in _OF_LOOP}
    return Settings(**{**own, "epochs": None, "steps": MANY_STEPS})


def strategy_of(values: Mapping[str, Any]) -> StrategyName:
    """Return who computes."""
    strategy: StrategyName = value_of(values, "strategy")
    return strategy


def num_shares(values: Mapping[str, Any], num_devices: int) -> int:
    """Return into how many devices' parts a global batch is divided."""
    return 1 if strategy_of(values) == "single" else num_devices


def threads(values: Mapping[str, Any], num_cores: int, num_devices: int) -> int:
    """Return the threads of one process, as a run with these settings has them."""
    return threads_of(strategy_of(values), num_cores, num_devices)


def is_per_process(values: Mapping[str, Any]) -> bool:
    """Return whether each device has a process of its own."""
    return strategy_of(values) in PER_PROCESS


def key_of(values: Mapping[str, Any]) -> str:
    """Return a text that is the same for the same values."""
    return json.dumps(dict(values), sort_keys=True)


def in_words(changes: Mapping[str, Any]) -> str:
    """Return changes as flags are spelled, without dashes before them: ``workers 2, prefetch 4``."""
    return ", ".join(f"{name.replace('_', '-')} {_word(value)}" for name, value in changes.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "as usual" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
