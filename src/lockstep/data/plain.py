"""What a checkpoint may hold: it is read without running code, so nothing but plain values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

_VALUES = {type(None), bool, int, float, complex, str, bytes}


def first_not_plain(value: Any, place: str = "") -> str | None:
    """Return type and place of the first thing in ``value`` that a checkpoint cannot hold, or None.

    It can hold numbers, strings, bytes, tensors, and lists, tuples and dicts of them; no numpy arrays or numbers.
    """
    if type(value) in _VALUES or isinstance(value, Tensor):
        return None
    if type(value) in {dict, OrderedDict}:
        places = [(item, f"{place}[{key!r}]") for key, item in value.items() for item in (key, item)]
    elif type(value) in {list, tuple}:
        places = [(item, f"{place}[{number}]") for number, item in enumerate(value)]
    else:
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return f"{name} at {place}" if place else name
    return next((found for item, where in places if (found := first_not_plain(item, where)) is not None), None)
