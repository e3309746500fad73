"""Hooks on models, loaders and optimizers of a training loop, whose errors do not affect the program."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.observe.steps import Steps
from lockstep.parallel.module_io import find_tensors
from lockstep.telemetry.step_times import Reduction

Fail = Callable[[Exception], None]


class Hook:
    """Calls ``listener`` and returns nothing; passes its errors to ``fail``, which ends the observation.

    Does nothing while a function is compiled. Copies and pickles do nothing, so that a copy of an observed model, such
    as one for averaged weights, is not observed.
    """

    # Suppresses torch's warning that tensors are pickled without the hook.
    __torch_unserializable__ = True

    def __init__(self, listener: Callable[..., object] | None = None, fail: Fail | None = None) -> None:
        self._listener, self._fail = listener, fail

    def __call__(self, *args: Any) -> None:
        """Call the listener."""
        if torch.compiler.is_compiling() or self._listener is None:
            return
        try:
            self._listener(*args)
        except Exception as error:
            assert self._fail is not None
            self._fail(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute; return a function that restores it, unless other code has replaced it since."""
    original = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    return undo


def in_backward() -> bool:
    """Return whether this thread runs a backward, which may recompute forwards."""
    return torch._C._current_graph_task_id() != -1


# [Note: the end of backward]
# A backward begins with the first gradient of an output of the model. Then a callback is queued for its end. Autograd
# calls such callbacks in order. torch's DistributedDataParallel queues the callback that waits for its buckets later,
# when the last bucket has been launched, so ours is called at the end of this rank's own work. It then queues a second
# callback after all others, which is called when the gradients are reduced. On CUDA, both are called after waiting for
# the streams of backward, so events mark the same moments on the device.

# A model may return thousands of tensors, such as caches; hooks on all would slow it down.
_MOST_OUTPUTS = 64


class Hooks:
    """Reports forwards and backwards of models, waiting for batches, and steps of optimizers to `Steps`.

    Args:
        steps: Gets the reports.
        take_stamps: Returns the time stamps of our engine for the backward that has just ended.
        fail: Gets errors of the hooks.

    Attributes:
        stop: Removes all hooks.
    """

    def __init__(self, steps: Steps, take_stamps: Callable[[], list[Reduction]], fail: Fail) -> None:
        self._steps, self._take_stamps, self._fail = steps, take_stamps, fail
        self._undo = ExitStack()
        self.stop = self._undo.close
        self._on_gradient = Hook(self._backward_begins, fail)
        self._on_own_done, self._on_end = Hook(self._own_work_done, fail), Hook(self._backward_ends, fail)
        self._task, self._num_inputs, self._num_updates = -1, 0, 0
        self._trains = self._is_within = False
        # Weak references, so that loaders, iterators and optimizers, and their processes, end as without hooks.
        self._batch_sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._are_ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    # --- models ---

    def watch_model(self, model: nn.Module) -> None:
        """Observe a model."""
        before, behind = Hook(self.forward_begins, self._fail), Hook(self._forward_ends, self._fail)
        if (compiled := compiled_call(model)) is not None:
            # Around the compiled function, as hooks inside would be compiled.
            def call(*args: Any, **kwargs: Any) -> Any:
                before(model, args, kwargs)
                output = compiled(*args, **kwargs)
                behind(model, args, kwargs, output)
                return output

            self._undo.callback(replace_attribute(model, "_compiled_call_impl", call))
        else:
            self._undo.callback(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            self._undo.callback(model.register_forward_hook(behind, with_kwargs=True).remove)

    def forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Report that a forward begins."""
        if not self._steps.is_mine or in_backward():
            return
        self._trains = self._steps.trains(has_grad=torch.is_grad_enabled(), is_training=model.training)
        if self._trains:
            self._steps.forward_begins()
        else:
            self._steps.idle_forward(is_over=False, is_training=model.training)

    def _forward_ends(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._steps.is_mine or in_backward():
            return
        if torch.is_grad_enabled():
            if self._steps.lacks_samples or not self._trains:
                self._num_inputs = max(self._num_inputs, num_samples(args) or num_samples(kwargs))
            tensors = (output,) if isinstance(output, Tensor) else islice(find_tensors(output), _MOST_OUTPUTS)
            # Backward may start from any output: the first gradient of any of them counts.
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)
        if self._trains:
            self._steps.forward_ends()
        else:
            self._steps.idle_forward(is_over=True, is_training=model.training)

    def _backward_begins(self, _: Tensor) -> None:
        """See [Note: the end of backward]; on CUDA, this runs in a thread of autograd."""
        task = torch._C._current_graph_task_id()
        if task in (-1, self._task) or not self._steps.is_watching:
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

    # --- loaders ---

    def _timed(self, call: Callable[[], Any], size: Callable[[Any], int | None]) -> Any:
        """Return the result of ``call``, and report its time; ``size`` returns the number of samples in it.

        Calls that raise, and calls inside others, are not reported.
        """
        if self._is_within or not self._steps.is_mine:
            return call()  # the loop waits for the outer of two nested loaders
        asked = self._steps.moment()
        self._is_within = True
        try:
            batch = call()
        finally:
            self._is_within = False
        try:
            self._steps.batch(asked, size(batch))
        except Exception as error:
            self._fail(error)
        return batch

    def iterated(self, batches: Any) -> Iterator[Any]:
        """Yield from ``batches``, and report the waiting."""
        iterator = self._timed(lambda: iter(batches), lambda _: None)
        while True:
            try:
                batch = self._timed(lambda: next(iterator), num_samples)
            except StopIteration:
                return
            yield batch

    def watch_loaders(self, loaders: Sequence[DataLoader[Any]] | None) -> None:
        """Observe these DataLoaders, or all of the process."""
        chosen: weakref.WeakSet[Any] = weakref.WeakSet()
        for each in loaders or ():
            chosen.add(getattr(each, "base_dataloader", None) or each)  # Accelerate's loaders contain one
        began, came, sizes = DataLoader.__iter__, _BaseDataLoaderIter.__next__, self._batch_sizes

        @functools.wraps(began)
        def begin(loader: DataLoader[Any]) -> Any:
            if loaders is not None and loader not in chosen:
                return began(loader)
            return self._timed(lambda: began(loader), lambda iterator: sizes.update({iterator: _batch_size(loader)}))

        @functools.wraps(came)
        def following(iterator: Any) -> Any:
            if loaders is not None and iterator not in sizes:
                return came(iterator)
            return self._timed(lambda: came(iterator), lambda batch: num_samples(batch, sizes.get(iterator)))

        self._undo.callback(replace_attribute(DataLoader, "__iter__", begin))
        self._undo.callback(replace_attribute(_BaseDataLoaderIter, "__next__", following))

    # --- optimizers ---

    def watch_optimizers(self, optimizers: Sequence[Optimizer] | None, models: Sequence[nn.Module]) -> None:
        """Observe these optimizers, or, if ``None``, all that update one of ``models``; more models may be added."""
        self._are_ours.update(dict.fromkeys(optimizers or (), True))
        self._updated = models if optimizers is None else ()
        self._undo.callback(register_optimizer_step_pre_hook(Hook(self._optimizer_begins, self._fail)).remove)
        self._undo.callback(register_optimizer_step_post_hook(Hook(self._optimizer_ends, self._fail)).remove)
        original = GradScaler.step
        begins, fails = Hook(self._steps.optimizer_begins, self._fail), Hook(self._steps.optimizer_failed, self._fail)
        ends = Hook(self._scaled, self._fail)

        # It skips the step of an optimizer if a gradient is not finite.
        @functools.wraps(original)
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not (scaler.is_enabled() and self._steps.is_mine and self._is_ours(optimizer)):
                return original(scaler, optimizer, *args, **kwargs)
            num_before = self._num_updates
            begins(id(optimizer))
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except BaseException:
                fails()
                raise
            ends(optimizer, num_before)
            return result

        self._undo.callback(replace_attribute(GradScaler, "step", step))

    def _scaled(self, optimizer: Optimizer, num_before: int) -> None:
        is_skipped = self._num_updates == num_before
        self._steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer), is_skipped=is_skipped)

    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not in_backward() and self._steps.is_mine and self._is_ours(optimizer):
            self._steps.optimizer_begins(id(optimizer))

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if in_backward():  # in any thread
            if not self._steps.is_over and self._is_ours(optimizer):
                self._steps.optimizer_within(learning_rate_of(optimizer))
        elif self._steps.is_mine and self._is_ours(optimizer):
            self._num_updates += 1
            self._steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer))

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._are_ours.get(optimizer)
        if known is None and self._updated:
            known = self._are_ours[optimizer] = updates(optimizer, self._updated)
        return bool(known)


def compiled_call(module: nn.Module) -> Any:
    """Return the function set by ``module.compile()``, which calls module and hooks; None if there is none."""
    return module._compiled_call_impl


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader; None if its sampler defines it."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def num_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor; 0 without tensors.

    Args:
        batch: From a loader, or the arguments of a forward.
        batch_size: Of the loader: a list with so many items is a list of samples.
    """
    if isinstance(batch, (list, tuple)) and batch:
        first = batch[0]
        if isinstance(first, Tensor) and first.dim() and batch_size is not None and first.shape[0] == batch_size:
            return batch_size  # the usual case
        if isinstance(first, (list, tuple)):
            return len(first)
        if len(batch) == batch_size:
            return batch_size
    elif isinstance(batch, Mapping) and batch:
        first = next(iter(batch.values()))
        if isinstance(first, (list, tuple)) and not any(isinstance(item, Tensor) for item in batch.values()):
            return len(first)
    tensor = next((found for found in find_tensors(batch) if found.dim()), None)
    return 0 if tensor is None else tensor.shape[0]


def updates(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of the models."""
    theirs = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in theirs for group in optimizer.param_groups for parameter in group["params"])


def learning_rate_of(optimizer: Optimizer) -> float | None:
    """Return the learning rate of the first group; None if there is none, or if it is on the device."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) else float(rate)
