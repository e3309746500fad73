"""The keys of state dicts: with ``module.`` from a wrapper, without from a bare model."""

from __future__ import annotations

from typing import Any

from torch import nn


def accept_bare_keys(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let ``load_state_dict`` take the keys of a bare model: those without ``module.``."""
    here = [key for key in state_dict if key.startswith(prefix)]
    if any(key.startswith(f"{prefix}module.") for key in here):
        return
    for key in here:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
