"""Hooks on optimizers, and on torch's GradScaler, which keeps an optimizer from a step whose gradient is not finite."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.observe.forwards import in_backward
from lockstep.observe.hook import Hook
from lockstep.observe.steps import Steps
from lockstep.parallel.ddp.capture import is_capturing


class Optimizers:
    """Tells of the steps of optimizers.

    Args:
        steps: Is told.
        device: Where the model is.
        optimizers: Those to watch; if ``None``, all that update one of ``models``.
        models: The models, of which there may be more later.
        fail: Gets errors of the hooks.
    """

    def __init__(
        self,
        steps: Steps,
        device: torch.device,
        optimizers: Sequence[Optimizer] | None,
        models: Sequence[nn.Module],
        fail: Callable[[Exception], None],
    ) -> None:
        self._steps, self._device, self._models = steps, device, models
        self._ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._is_cuda = device.type == "cuda"
        self._num_updates = 0
        before, behind = Hook(self._begins, fail), Hook(self._ends, fail)
        if optimizers is None:
            self._handles: list[Any] = [
                register_optimizer_step_pre_hook(before),
                register_optimizer_step_post_hook(behind),
            ]
        else:
            self._handles = [each.register_step_pre_hook(before) for each in optimizers]
            self._handles += [each.register_step_post_hook(behind) for each in optimizers]
            self._ours.update(dict.fromkeys(optimizers, True))
        self._watches_all = optimizers is None
        self._undo = _watch_scaler(self._scaled_step, fail)

    def stop(self) -> None:
        """Watch none any more."""
        while self._handles:
            self._handles.pop().remove()
        self._undo()

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not in_backward() and self._sees(optimizer):
            self._steps.optimizer_begins(id(optimizer))

    def _ends(self, optimizer: Optimizer, *_: Any) -> None:
        if in_backward():  # in whatever thread that runs
            if not self._steps.is_over and self._is_ours(optimizer):
                self._steps.optimizer_within(learning_rate_of(optimizer))
        elif self._sees(optimizer):
            self._num_updates += 1
            self._steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer))

    def _scaled_step(self, optimizer: Optimizer) -> Callable[[bool], None] | None:
        """Begin a step of a GradScaler; return what to call when it is over, with whether it went well."""
        if not self._sees(optimizer):
            return None
        before = self._num_updates
        self._steps.optimizer_begins(id(optimizer))

        def over(went_well: bool) -> None:
            if not went_well:
                self._steps.optimizer_failed()
                return
            skipped = self._num_updates == before
            self._steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer), is_skipped=skipped)

        return over

    def _sees(self, optimizer: Optimizer) -> bool:
        if not self._steps.is_mine or (self._is_cuda and is_capturing(self._device)):
            return False
        return self._is_ours(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None and self._watches_all and self._models:
            known = self._ours[optimizer] = updates(optimizer, self._models)
        return bool(known)


def updates(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of the models."""
    theirs = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in theirs for group in optimizer.param_groups for parameter in group["params"])


def learning_rate_of(optimizer: Optimizer) -> float | None:
    """Return the learning rate of the first group; None if there is none, or only the device knows it."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or (isinstance(rate, Tensor) and rate.is_cuda) else float(rate)


def _watch_scaler(
    begin: Callable[[Optimizer], Callable[[bool], None] | None], fail: Callable[[Exception], None]
) -> Callable[[], None]:
    """Have ``begin`` called with each step of any enabled GradScaler, from now on; return what undoes that."""
    original = GradScaler.step

    @functools.wraps(original)
    def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        over: list[Callable[[bool], None]] = []
        if scaler.is_enabled():
            Hook(lambda: over.extend(filter(None, [begin(optimizer)])), fail)()
        went_well = False
        try:
            result = original(scaler, optimizer, *args, **kwargs)
            went_well = True
            return result
        finally:
            for each in over:
                Hook(each, fail)(went_well)

    patched: Any = GradScaler
    patched.step = step

    def undo() -> None:
        if patched.step is step:
            patched.step = original

    return undo
