"""Move the tensors in a forward's arguments to a device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; other things, and containers of unknown type, as they are.

    Looks into tuples, named tuples, lists, dicts and dataclasses. Copies from pinned memory do not block.
    """
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_to(item, device) for item in value))
    if type(value) in (list, tuple):
        return type(value)(move_to(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, move_to(item, device)) for key, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        moved = {field.name: move_to(getattr(value, field.name), device) for field in fields(value) if field.init}
        return replace(value, **moved)
    return value
