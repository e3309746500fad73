"""The tensors in what goes into a module and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value``: itself, or in nested lists, tuples, sets, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name, None))


class _Anchor(torch.autograd.Function):
    """Passes a tensor through and makes it require a gradient, which then goes nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def anchor_tensors(value: Any) -> Any:
    """Return ``value`` with its floating-point tensors able to start a backward.

    A rank whose forward touched no parameter must still take part in the reduction. Its loss could not be
    differentiated at all; anchored, ``loss.backward()`` works, yields no gradient, and is noticed.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point() and not value.is_complex():
            return value
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return _Anchor.apply(anchor, value)  # type: ignore[no-untyped-call]
    if type(value) is dict:
        return {key: anchor_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(anchor_tensors(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(anchor_tensors(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        anchored = {field.name: anchor_tensors(getattr(value, field.name)) for field in fields(value) if field.init}
        return replace(value, **anchored)
    return value
