"""Hooks on parameters: which gradient has arrived, and that one arrived which nobody averages.

Hooks live as long as their model. They hold the listener by a weak reference, so as not to keep it alive with its
buckets when the wrapper is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.parallel.ddp.dynamo import keep_out_of_graphs

Hook = Callable[[Tensor], None]


class Listener(Protocol):
    """What wants to know of gradients: the reducer."""

    @property
    def is_collecting(self) -> bool:
        """Whether a synchronised backward runs."""

    def on_gradient(self, index: int) -> None:
        """Take notice that the gradient of a parameter was accumulated."""


class ParameterHooks:
    """Calls ``listener.on_gradient(index)`` when a parameter has received a gradient, of those that `set` names."""

    def __init__(self, parameters: Sequence[nn.Parameter], listener: Listener) -> None:
        self._parameters = parameters
        self._listener = weakref.ref(listener)
        self._handles: dict[int, Any] = {}
        self._is_deaf = False

    def set(self, indices: Collection[int]) -> bool:
        """Hook these parameters and no others; new hooks run behind those of others. Return False after `stop`."""
        if self._is_deaf:
            return False
        for index in [index for index in self._handles if index not in indices]:
            self._unset(index)
        for index in indices:
            if index not in self._handles:
                self._handles[index] = _hook(self._parameters[index], self._make(index))
        return True

    def move_last(self) -> None:
        """Let our hooks run behind those that others have registered since."""
        for index, handle in self._handles.items():
            hooks = self._parameters[index]._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd sees no move_to_end

    def stop(self) -> None:
        """Remove all hooks, for good."""
        self.set(())
        self._is_deaf = True

    def _make(self, index: int) -> Hook:
        reference = self._listener

        @keep_out_of_graphs
        def on_gradient(_parameter: Tensor) -> None:
            target = reference()
            if target is not None:
                target.on_gradient(index)

        return on_gradient

    def _unset(self, index: int) -> None:
        self._handles.pop(index).remove()
        parameter = self._parameters[index]
        if not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # or else autograd goes on to ask Python for hooks


def _hook(parameter: nn.Parameter, hook: Hook) -> Any:
    """Register ``hook``, also on a parameter that is frozen now, for the time when it is not."""
    requires_grad = parameter.requires_grad
    try:
        parameter.requires_grad_(True)  # only such parameters take hooks
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(requires_grad)


def watch_frozen(parameters: Mapping[str, nn.Parameter], listener: Listener) -> None:
    """Make a synchronised backward raise LockstepError when it reaches a parameter that is frozen now.

    Buckets are planned once, for the parameters that require a gradient at that time. The gradient of one that is
    unfrozen later would not be averaged: ranks would drift apart, and nobody would notice. It costs nothing as long
    as parameters stay frozen, since the hooks then never run. Backwards of other wrappers are left alone.
    """
    reference = weakref.ref(listener)
    for name, parameter in parameters.items():
        can_train = (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()
        if can_train and not parameter.requires_grad:
            _hook(parameter, _alarm(name, reference))


def _alarm(name: str, reference: weakref.ref[Listener]) -> Hook:
    @keep_out_of_graphs
    def on_gradient(_parameter: Tensor) -> None:
        listener = reference()
        if listener is not None and listener.is_collecting:
            raise LockstepError(
                f"Parameter {name} was frozen when the model was wrapped, but is trained now: its gradient would not "
                "be averaged over the ranks.\nUnfreeze before wrapping, or wrap again after unfreezing: "
                "model = DistributedDataParallel(model.module)."
            )

    return on_gradient


def second_gradient(rank: int, name: str) -> LockstepError:
    """Return the error about a gradient that comes when its bucket has left."""
    return LockstepError(
        f"Rank {rank}: parameter {name} received a second gradient in one backward, "
        "after its bucket had been sent.\nThis happens when a layer is checkpointed several times with "
        "use_reentrant=True in some steps but not in the first. Use use_reentrant=False."
    )
