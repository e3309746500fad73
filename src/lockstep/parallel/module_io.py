"""How wrappers access their module: the tensors in inputs and outputs, its parameters, and the names of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.torch_internals import own_parameters, submodules

requires_grad = attrgetter("requires_grad")
_get = dict[str, Any].get


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


def hook_tensors(value: Any, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Make autograd call ``hook`` with the gradient of each tensor in ``value``, in every backward through it."""
    for tensor in find_tensors(value):
        if tensor.grad_fn is not None:  # a hook on a leaf would be permanent
            tensor.register_hook(hook)


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors; containers of unknown type are not changed."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple: its class takes the items one by one
        return type(value)(*(_map_tensors(function, item) for item in value))
    if type(value) in (list, tuple):  # subclasses may have other constructors and are not changed
        return type(value)(_map_tensors(function, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):  # before dicts: some are both
        items = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: _map_tensors(function, item) for name, item in items.items()})
    if isinstance(value, dict):
        return type(value)((key, _map_tensors(function, item)) for key, item in value.items())
    return value


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; copies from pinned memory do not block."""
    return _map_tensors(lambda each: each if each.device == device else each.to(device, non_blocking=True), value)


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

    def anchor(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        start = torch.zeros((), device=tensor.device, requires_grad=True)
        anchored: Tensor = _Anchor.apply(start, tensor)  # type: ignore[no-untyped-call]
        return anchored

    return _map_tensors(anchor, value)


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
