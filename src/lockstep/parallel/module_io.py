"""How wrappers access their module: the tensors in inputs and outputs, and the names of its state."""

from collections.abc import Callable
from itertools import chain
from operator import is_not, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.base import torch_internals
from lockstep.base.containers import map_tensors, with_items


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; copies from pinned memory do not block."""

    def move(part: Any) -> Any:
        is_moved = isinstance(part, Tensor | PackedSequence)
        return part.to(device=device, non_blocking=True) if is_moved else part

    return map_tensors(value, move, move)


class _Anchor(torch.autograd.Function):
    """Returns a tensor unchanged, but with a gradient function."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients


def anchor_tensors(value: Any) -> Any:
    """Return ``value`` with floating-point tensors that have a gradient function."""
    # A rank whose forward used no parameter must still take part in the reduction. Without an anchor, its loss is a
    # constant or a leaf. With an anchor, ``loss.backward()`` works, gives no gradient, and the reducer notices it.

    def anchor(part: Any) -> Any:
        if isinstance(part, PackedSequence):
            return with_items(part, [anchor(part.data), *part[1:]])
        if not isinstance(part, Tensor) or not (part.is_floating_point() or part.is_complex()):
            return part
        start = torch.zeros((), device=part.device, requires_grad=True)
        return _Anchor.apply(start, part)  # type: ignore[no-untyped-call]

    return map_tensors(value, anchor, anchor)


_values = methodcaller("values")  # a TorchScript module has other mappings than dicts


class Registered:
    """Detects that a module has other layers, or other tensors in them, than when it was looked at last.

    Args:
        module: The model.
        tensors_of: Returns the tensors that a layer itself has, such as its buffers.
    """

    def __init__(self, module: nn.Module, tensors_of: Callable[[nn.Module], dict[str, Any]]) -> None:
        self._module, self._tensors_of = module, tensors_of
        self.note()

    def note(self) -> None:
        """Record which tensors and layers are registered, and where."""
        getters = self._tensors_of, torch_internals.submodules
        self._homes: list[dict[str, Any]] = [get(layer) for layer in self._module.modules() for get in getters]
        self._entries = list(chain.from_iterable(map(_values, self._homes)))

    def have_changed(self) -> bool:
        """Return whether one was added, removed or replaced since."""
        # No Python loop if nothing has changed, since this runs in every step.
        entries = list(chain.from_iterable(map(_values, self._homes)))
        return len(entries) != len(self._entries) or any(map(is_not, entries, self._entries))


class Wrapper(nn.Module):
    """A module that wraps another one as ``module``, and loads state dicts with or without the ``module.`` prefix."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        keys = [key for key in state_dict if key.startswith(prefix)]
        own_names = {prefix + name for name, _ in [*self.named_parameters(), *self.named_buffers()]}
        if own_names.isdisjoint(keys):  # not by the prefix: the bare module may have a child named "module"
            for key in keys:  # in place: ``load_state_dict`` has made a copy, and loads ``module`` only after this
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
            versions = getattr(state_dict, "_metadata", {})
            for key in [key for key in versions if f"{key}.".startswith(prefix)]:
                name = f"{prefix}module.{f'{key}.'.removeprefix(prefix)}".rstrip(".")
                versions.setdefault(name, versions[key])
        super()._load_from_state_dict(state_dict, prefix, *args)
