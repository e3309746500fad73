"""Which step of the training a rank is in, and where in it: for a task, and for any script."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from lockstep.train.loop import Loop

Listener = Callable[[str], None]


class Clock:
    """Tells a listener whenever the rank comes to a place in a step; steps are counted from 1.

    ``fit`` knows its step, also after it resumed. In other programs it is the number of steps that the optimizer has
    taken in this process, and one: of several optimizers the one that has taken most.

    The places are ``loader`` (the next batch is asked for), ``forward`` (a module is called with gradients enabled),
    ``backward`` (``backward()`` is called), ``optimizer`` (its ``step()`` is called) and ``updated`` (it is over).

    Attributes:
        model: The outermost module of the last forward, if it has parameters to train.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._fit_step: int | None = None
        self._is_inside = False
        self._num_visits = 0
        self._num_updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None
        self._model_step = 0

    @property
    def step(self) -> int:
        """The step that this rank is in; between two steps of ``fit`` the one that is over."""
        if self._fit_step is not None:
            return self._fit_step
        return max(self._num_updates.values(), default=0) + 1

    @property
    def visit(self) -> int:
        """A number that is another one whenever a step begins, also the same one again after ``fit`` went back."""
        return self._num_visits if self._fit_step is not None else self.step

    @property
    def model(self) -> nn.Module | None:
        """The model that is trained, as far as it is known by now."""
        return None if self._model is None else self._model()

    def start(self) -> None:
        """Put the hooks in place, for good."""
        for kind in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
            self._tell_before(kind, "_next_data", "loader")
        self._tell_before(torch.autograd, "backward", "backward")
        register_module_forward_pre_hook(self._on_forward)
        register_optimizer_step_pre_hook(lambda *_: self._tell("optimizer"))
        register_optimizer_step_post_hook(self._on_updated)
        self._follow_fit()

    def _tell(self, place: str) -> None:
        # Of what fit does between its steps, such as evaluation, nothing belongs to a step.
        if self._is_inside or self._fit_step is None:
            self._listener(place)

    def _tell_before(self, owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            self._tell(place)
            return original(*args, **kwargs)

        setattr(owner, name, told)

    def _on_forward(self, module: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._model_step != self.step and any(found.requires_grad for found in module.parameters()):
            self._model_step, self._model = self.step, weakref.ref(module)
        self._tell("forward")

    def _on_updated(self, optimizer: Any, *_: Any) -> None:
        # Before counting: what happens now belongs to the step that is over.
        if self._fit_step is None:
            self._tell("updated")
        self._num_updates[optimizer] = self._num_updates.get(optimizer, 0) + 1

    def _follow_fit(self) -> None:
        step = Loop.step

        @functools.wraps(step)
        def followed(loop: Loop) -> Any:
            self._fit_step, self._is_inside = loop.num_steps_done + 1, True
            self._num_visits += 1
            try:
                record = step(loop)
                self._tell("updated")
                return record
            finally:
                self._is_inside = False

        Loop.step = followed  # type: ignore[method-assign, assignment]
