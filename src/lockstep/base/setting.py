"""A setting: an annotated field of a dataclass, from which checks and flags are made. Standard library only."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.errors import ConfigurationError


def _is_number(value: object, kinds: tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)  # bool is a subclass of int


def _are_positive(value: Any) -> bool:
    are_numbers = isinstance(value, Sequence) and len(value) > 0 and all(map(_is_number, value))
    return are_numbers and all(0 < number < math.inf for number in value)


def _are_words(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(word, str) for word in value)
    )


# By kind: the types in the annotation of a field, the check of a value, and its description.
_KINDS: dict[str, tuple[set[Any], Callable[[Any], bool], str]] = {
    "int": ({int}, lambda value: _is_number(value, (int,)), "a whole number"),
    "devices": (
        {int, Literal["auto"]},
        lambda value: value == "auto" or (_is_number(value, (int,)) and value > 0),
        "a whole number of at least 1, or auto",
    ),
    "float": ({float}, _is_number, "a number"),
    "bool": ({bool}, lambda value: isinstance(value, bool), "True or False"),
    "path": ({str, Path}, lambda value: isinstance(value, (str, Path)), "a path"),
    "numbers": ({Sequence[float]}, _are_positive, "numbers above 0, such as (2, 1, 1)"),
    "text": ({str}, lambda value: isinstance(value, str), "a string"),
    "words": ({str, Sequence[str]}, _are_words, "a string, or several"),
    "metric": ({bool, str}, lambda value: isinstance(value, (bool, str)), "True, or a metric such as accuracy:max"),
}


# The unit of a path that may be in an object store.
DIR_OR_URL = "DIR|URL"


def setting(default: Any, help: str, unit: str | None = None, at_least: int | None = None) -> Any:
    """Return a field of a dataclass of settings; see `Setting`."""
    return field(default=default, metadata={"help": help, "unit": unit, "at_least": at_least})


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass of settings.

    Args:
        name, kind, choices, default: As declared.
        optional: Whether it may be None.
        help: One sentence for ``--help``.
        unit: The unit of a number, or a placeholder, for ``--help``.
        at_least: Smallest number allowed.
    """

    name: str
    kind: str
    optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    unit: str | None
    at_least: int | None

    def check(self, value: Any) -> None:
        """Check a value.

        Raises:
            ConfigurationError: It has the wrong type or is out of range; says what is allowed.
        """
        if value is None and self.optional:
            return
        if self.kind == "choice":
            is_allowed, allowed = value in self.choices, "one of " + ", ".join(self.choices)
        else:
            _, test, allowed = _KINDS[self.kind]
            is_allowed = test(value)
        if self.kind == "path" and is_allowed and "://" in str(value) and self.unit != DIR_OR_URL:
            is_allowed, allowed = False, "a path on this machine: only checkpoints can be in an object store"
        if self.at_least is not None:
            is_allowed, allowed = is_allowed and value >= self.at_least, f"{allowed} of at least {self.at_least}"
        if not is_allowed:
            raise ConfigurationError(f"{self.name}={value!r} is not allowed.\nGive {allowed}.")


@cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return the settings of the dataclass ``cls``, in the order of its fields."""
    hints = get_type_hints(cls)
    settings = []
    # `fit` has keywords that are no settings.
    for declared in (declared for declared in fields(cls) if declared.metadata):
        hint = hints[declared.name]
        members = set(get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint])
        kinds = members - {type(None)}
        choices = [choice for type_ in kinds if get_origin(type_) is Literal for choice in get_args(type_)]
        kind = next((kind for kind, (types_of, *_) in _KINDS.items() if types_of == kinds), "choice")
        optional = kinds != members
        settings.append(Setting(declared.name, kind, optional, tuple(choices), declared.default, **declared.metadata))
    return tuple(settings)
