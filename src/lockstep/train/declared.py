"""Settings as data: what a dataclass of annotated fields declares, for checking values and for making flags."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from lockstep.errors import ConfigurationError

FilePath = str | Path
Kind = Literal["int", "float", "bool", "path", "choice", "numbers", "words"]


@dataclass(frozen=True)
class Flag:
    """What a field says of itself, besides its type and default.

    Args:
        help: One sentence for ``--help``.
        unit: What its number or path stands for.
        at_least: Smallest number allowed.
    """

    help: str
    unit: str | None = None
    at_least: int | None = None


@dataclass(frozen=True)
class Setting:
    """One field, as checked and shown; ``optional`` ones may be None, and numbers may be one of the ``choices``."""

    name: str
    kind: Kind
    optional: bool
    choices: tuple[str, ...]
    default: Any
    flag: Flag

    def check(self, value: object) -> None:
        """Check a value.

        Raises:
            ConfigurationError: It is of the wrong kind or out of range; says what is allowed.
        """
        if value is None and self.optional:
            return
        allowed = self._allowed(value)
        if allowed is not None:
            raise ConfigurationError(f"{self.name}={value!r} is not allowed.\nGive {allowed}.")

    def _allowed(self, value: object) -> str | None:
        """Return in words what is allowed if ``value`` is not."""
        if self.kind == "choice":
            return None if value in self.choices else "one of " + ", ".join(self.choices)
        if self.kind == "bool":
            return None if isinstance(value, bool) else "True or False"
        if self.kind == "path":
            return None if isinstance(value, (str, Path)) else "a path"
        if self.kind == "numbers":
            return None if _are_positive(value) else "numbers above 0, such as (2, 1, 1)"
        if self.kind == "words":
            return None if _are_words(value) else "a text, or several"
        if isinstance(value, str) and value in self.choices:
            return None
        numbers = (int,) if self.kind == "int" else (int, float)
        smallest = self.flag.at_least
        if isinstance(value, numbers) and not isinstance(value, bool) and (smallest is None or value >= smallest):
            return None
        number = "a whole number" if self.kind == "int" else "a number"
        words = "".join(f", or {choice}" for choice in self.choices)
        return (number if smallest is None else f"{number} of at least {smallest}") + words


def _are_positive(value: object) -> bool:
    """Return whether ``value`` is a sequence of finite numbers above 0, of one at least."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(
            isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number < math.inf
            for number in value
        )
    )


def _are_words(value: object) -> bool:
    """Return whether ``value`` is a text, or a sequence of texts, of one at least."""
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(word, str) for word in value)


@cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return what the dataclass ``cls`` declares, in the order of its fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_setting(field.name, hints[field.name], field.default) for field in fields(cls))


def _setting(name: str, hint: Any, default: object) -> Setting:
    assert typing.get_origin(hint) is Annotated and default is not MISSING, name
    inner, flag = typing.get_args(hint)
    assert isinstance(flag, Flag), name
    members = typing.get_args(inner) if typing.get_origin(inner) in (Union, types.UnionType) else (inner,)
    optional = type(None) in members
    members = tuple(member for member in members if member is not type(None))
    choices = tuple(
        word for member in members if typing.get_origin(member) is Literal for word in typing.get_args(member)
    )
    members = tuple(member for member in members if typing.get_origin(member) is not Literal)
    if not members:
        return Setting(name, "choice", optional, choices, default, flag)
    kinds: dict[frozenset[Any], Kind] = {
        frozenset({int}): "int",
        frozenset({float}): "float",
        frozenset({bool}): "bool",
        frozenset({str, Path}): "path",
        frozenset({Sequence[float]}): "numbers",
        frozenset({str, Sequence[str]}): "words",
    }
    return Setting(name, kinds[frozenset(members)], optional, choices, default, flag)


def check_all(settings: object) -> None:
    """Check every field of a dataclass of settings; see `Setting.check`."""
    cls: type = type(settings)
    for setting in settings_of(cls):
        setting.check(getattr(settings, setting.name))
