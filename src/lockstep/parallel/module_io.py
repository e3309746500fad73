"""How wrappers access their module: the tensors in inputs and outputs, its parameters, and the names of its state."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.containers import find_tensors as find_tensors
from lockstep.containers import map_tensors, with_items
from lockstep.errors import LockstepError
from lockstep.torch_internals import own_parameters, submodules

requires_grad = attrgetter("requires_grad")
_get = dict[str, Any].get


def hook_tensors(value: Any, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Make autograd call ``hook`` with the gradient of each tensor in ``value``, in every backward through it."""
    for tensor in find_tensors(value):
        if tensor.grad_fn is not None:  # a hook on a leaf would be permanent
            tensor.register_hook(hook)


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; copies from pinned memory do not block."""

    def move(part: Any) -> Any:
        is_moved = isinstance(part, Tensor | PackedSequence)
        return part.to(device=device, non_blocking=True) if is_moved else part

    return map_tensors(value, move, move)


class _Anchor(torch.autograd.Function):
    """Returns a tensor unchanged, but requiring a gradient, which is then dropped."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def anchor_tensors(value: Any) -> Any:
    """Return ``value`` with floating-point tensors that can start a backward."""
    # A rank whose forward used no parameter must still take part in the reduction. Without an anchor, its loss has no
    # gradient function. With an anchor, ``loss.backward()`` works, gives no gradient, and the reducer notices it.

    def anchor(part: Any) -> Any:
        if isinstance(part, PackedSequence):
            return with_items(part, [anchor(part.data), *part[1:]])
        if not isinstance(part, Tensor) or not (part.is_floating_point() or part.is_complex()):
            return part
        start = torch.zeros((), device=part.device, requires_grad=True)
        return _Anchor.apply(start, part)  # type: ignore[no-untyped-call]

    return map_tensors(value, anchor, anchor)


class Wrapper(nn.Module):
    """A module that wraps another one as ``module``, and loads state dicts with or without the ``module.`` prefix."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        here = [key for key in state_dict if key.startswith(prefix)]
        own = {prefix + name for name, _ in [*self.named_parameters(), *self.named_buffers()]}
        if own.isdisjoint(here):  # not by the prefix: the bare module may have a child named "module"
            for key in here:  # in place: ``load_state_dict`` has made a copy, and loads ``module`` only after this
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
            versions = getattr(state_dict, "_metadata", {})
            for key in [key for key in versions if f"{key}.".startswith(prefix)]:
                name = f"{prefix}module.{f'{key}.'.removeprefix(prefix)}".rstrip(".")
                versions.setdefault(name, versions[key])
        super()._load_from_state_dict(state_dict, prefix, *args)


class WrappedParameters:
    """Detects parameters whose gradients would not be averaged: those added or unfrozen after wrapping.

    Args:
        module: The model.
        ignore: Names of parameters that are not reduced.
    """

    def __init__(self, module: nn.Module, ignore: set[str]) -> None:
        self._module, self._ignore = module, ignore
        self._known = set(module.parameters())
        named = module.named_parameters()
        self._frozen = {each for name, each in named if not each.requires_grad and name not in ignore}
        self._note_entries()

    def _note_entries(self) -> None:
        """Record where each parameter and each layer is registered, and under which name."""
        self._homes: list[dict[str, Any]] = []
        for layer in self._module.modules():
            self._homes += [own_parameters(layer), submodules(layer)]
        self._num_entries = sum(map(len, self._homes))
        self._home_of = [home for home in self._homes for _ in home]
        self._names = [name for home in self._homes for name in home]
        self._entries = [home[name] for home in self._homes for name in home]

    def check(self) -> None:
        """Raise LockstepError if there is a trainable parameter that is in no bucket."""
        # No Python loop if nothing has changed, since this runs in every step.
        entries = map(_get, self._home_of, self._names)
        is_changed = sum(map(len, self._homes)) != self._num_entries or any(map(is_not, entries, self._entries))
        if not is_changed and not any(map(requires_grad, self._frozen)):
            return
        for name, parameter in self._module.named_parameters():
            # torch.func.functional_call temporarily puts plain tensors there, which must not be averaged.
            if name in self._ignore or not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
                continue
            if parameter in self._frozen or parameter not in self._known:
                what = "is trained now, but was frozen" if parameter in self._frozen else "was not in the model"
                raise LockstepError(
                    f"Parameter {name} {what} when it was wrapped: its gradient would not be averaged over the ranks.\n"
                    "Replace or unfreeze before wrapping, or wrap again: model = DistributedDataParallel(model.module)."
                )
        self._note_entries()
