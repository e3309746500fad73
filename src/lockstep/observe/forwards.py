"""Hooks on models and on what they return: when forward and backward begin and end.

[Note: the end of backward]
When the first gradient comes to what a model has returned, its backward begins, and a callback is put at its end.
Autograd calls those in the order in which they were put there. torch's DistributedDataParallel puts the one in which it
waits for its buckets there when the last of them is on its way, so later: ours sees this rank's own work done. Then it
puts a second one behind all others, which sees the gradients reduced. On CUDA both are called with the streams of
backward waited for, so that events tell the same of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lockstep.observe.hook import Hook
from lockstep.observe.samples import num_samples
from lockstep.observe.steps import Steps
from lockstep.parallel.ddp.bucket_stamps import StepStamps
from lockstep.parallel.ddp.capture import is_capturing
from lockstep.parallel.ddp.outputs import find_tensors

_MOST_OUTPUTS = 64

Fail = Callable[[Exception], None]


def in_backward() -> bool:
    """Return whether this thread runs a backward, which may run forwards again."""
    return torch._C._current_graph_task_id() != -1


def has_compiled_call(module: nn.Module) -> bool:
    """Return whether calls of a module go to a compiled function, hooks and all, as ``module.compile()`` has it."""
    return module._compiled_call_impl is not None


class Forwards:
    """Tells of the forwards and backwards of models.

    Args:
        steps: Is told.
        device: Where the models are.
        take_stamps: Returns what an engine of ours has stamped of the backward that has just ended.
        fail: Gets errors of the hooks.
    """

    def __init__(
        self, steps: Steps, device: torch.device, take_stamps: Callable[[], list[StepStamps]], fail: Fail
    ) -> None:
        self._steps, self._device, self._take_stamps = steps, device, take_stamps
        self._fail = fail
        self._is_cuda = device.type == "cuda"
        self._on_gradient = Hook(self._backward_begins, fail)
        self._on_own_done, self._on_end = Hook(self._own_work_done, fail), Hook(self._backward_ends, fail)
        self._task = -1
        self._trains = False
        self._num_inputs = 0
        self._undo: list[Callable[[], None]] = []

    def watch(self, model: nn.Module) -> None:
        """Watch a model from now on."""
        before, behind = Hook(self.begins, self._fail), Hook(self._ends, self._fail)
        if has_compiled_call(model):
            self._undo.append(_around_compiled(model, before, behind))
            return
        pre = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        post = model.register_forward_hook(behind, with_kwargs=True)
        self._undo += [pre.remove, post.remove]

    def stop(self) -> None:
        """Watch no model any more."""
        while self._undo:
            self._undo.pop()()

    def begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Take notice that a forward begins."""
        if not self._sees():
            return
        self._trains = self._steps.trains(has_grad=torch.is_grad_enabled(), is_training=model.training)
        if self._trains:
            self._steps.forward_begins()
        else:
            self._steps.idle_forward(is_over=False, is_training=model.training)

    def _ends(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._sees():
            return
        if torch.is_grad_enabled():
            if self._steps.lacks_samples or not self._trains:
                self._num_inputs = max(self._num_inputs, num_samples(args) or num_samples(kwargs))
            tensors = (output,) if isinstance(output, Tensor) else islice(find_tensors(output), _MOST_OUTPUTS)
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)
        if self._trains:
            self._steps.forward_ends()
        else:
            self._steps.idle_forward(is_over=True, is_training=model.training)

    def _sees(self) -> bool:
        return self._steps.is_mine and not in_backward() and not (self._is_cuda and is_capturing(self._device))

    def _backward_begins(self, _: Tensor) -> None:
        """Take notice of a gradient; see [Note: the end of backward]."""
        task = torch._C._current_graph_task_id()
        if task in (-1, self._task) or self._steps.is_over or (self._is_cuda and is_capturing(self._device)):
            return
        self._task = task
        self._steps.backward_begins(self._num_inputs)
        self._num_inputs = 0
        Variable._execution_engine.queue_callback(self._on_own_done)

    def _own_work_done(self) -> None:
        self._steps.own_work_done()
        Variable._execution_engine.queue_callback(self._on_end)

    def _backward_ends(self) -> None:
        self._steps.backward_ends(self._take_stamps())


def _around_compiled(model: nn.Module, before: Hook, behind: Hook) -> Callable[[], None]:
    """Have hooks called around the compiled function of a model, not in it; return what undoes that."""
    original: Any = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        before(model, args, kwargs)
        output = original(*args, **kwargs)
        behind(model, args, kwargs, output)
        return output

    def undo() -> None:
        if model._compiled_call_impl is call:
            model._compiled_call_impl = original

    model._compiled_call_impl = call
    return undo
