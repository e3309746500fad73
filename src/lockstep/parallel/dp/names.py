"""Names in a state: with ``module.`` before them, or without."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


def with_prefix(state_dict: Mapping[str, Any], own_names: set[str]) -> Mapping[str, Any]:
    """Return ``state_dict`` with ``module.`` before each name, unless more names fit as they are."""
    as_is = sum(name in own_names for name in state_dict)
    prefixed = sum(f"module.{name}" in own_names for name in state_dict)
    if as_is >= prefixed:
        return state_dict
    wrapped = OrderedDict((f"module.{name}", value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        wrapped._metadata = {f"module.{name}".rstrip("."): entry for name, entry in metadata.items()}  # type: ignore[attr-defined]
    return wrapped
