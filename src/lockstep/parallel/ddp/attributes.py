"""Which attributes of a wrapped module may be read through its wrapper."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def forward_attribute(wrapper: nn.Module, module: nn.Module, name: str) -> Any:
    """Return ``module.name`` where that cannot bypass the reduction of gradients.

    Plain values (``model.config``, ``model.dtype``) pass. Methods, submodules and tensors that require a gradient
    do not: a forward through them would train without synchronisation, and nobody would notice.

    Raises:
        AttributeError: The module has no such attribute, or reading it here would not be safe.
    """
    wrapper_name = type(wrapper).__name__
    missing = f"'{wrapper_name}' object has no attribute '{name}'"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        value = getattr(module, name)
    except AttributeError:
        raise AttributeError(missing) from None
    trains = isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad)
    if trains or (callable(value) and not isinstance(value, type)):
        raise AttributeError(
            f"{missing}\nThe wrapped {type(module).__name__} has one, but a forward through it would not synchronise "
            f"gradients. If that is what you want, write `.module.{name}`."
        )
    return value
