"""Hooks on models, loaders and optimizers of a training loop, which never harm the program they watch."""

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
from lockstep.telemetry.run_record import Reduction

Fail = Callable[[Exception], None]


class Hook:
    """Calls ``listener`` and returns nothing; passes an error of it to ``fail``: errors of ours end the watching only.

    Within a function that is compiled it does nothing. Copies and pickles of it do nothing either: a copy of a model
    that is watched, such as one for averaged weights, is not watched.
    """

    # Keeps torch from warning that tensors are pickled without it.
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
    """Put a function of ours in the place of one; return what puts that back, unless somebody else was there since."""
    original = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    return undo


def in_backward() -> bool:
    """Return whether this thread runs a backward, which may run forwards again."""
    return torch._C._current_graph_task_id() != -1


# [Note: the end of backward]
# When the first gradient comes to what a model has returned, its backward begins, and a callback is put at its end.
# Autograd calls those in the order in which they were put there. torch's DistributedDataParallel puts the one in
# which it waits for its buckets there when the last of them is on its way, so later: ours sees this rank's own work
# done. Then it puts a second one behind all others, which sees the gradients reduced. On CUDA both are called with
# the streams of backward waited for, so that events mark the same moments on the device.

# A model may return thousands of tensors, such as caches; a hook on each would slow it down.
_MOST_OUTPUTS = 64


class Hooks:
    """Reports the forwards and backwards of models, the waiting for batches, and the steps of optimizers.

    Args:
        steps: To which.
        take_stamps: Returns what an engine of ours has stamped of the backward that has just ended.
        fail: Gets errors of the hooks.

    Attributes:
        stop: Takes all hooks away.
    """

    def __init__(self, steps: Steps, take_stamps: Callable[[], list[Reduction]], fail: Fail) -> None:
        self._steps, self._take_stamps, self._fail = steps, take_stamps, fail
        self._undo = ExitStack()
        self.stop = self._undo.close
        self._on_gradient = Hook(self._backward_begins, fail)
        self._on_own_done, self._on_end = Hook(self._own_work_done, fail), Hook(self._backward_ends, fail)
        self._task, self._num_inputs, self._num_updates = -1, 0, 0
        self._trains = self._is_within = False
        # Loaders, iterators and optimizers are held weakly: they, and processes of theirs, end when they always did.
        self._batch_sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._are_ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    # --- models ---

    def watch_model(self, model: nn.Module) -> None:
        """Watch a model."""
        before, behind = Hook(self.forward_begins, self._fail), Hook(self._forward_ends, self._fail)
        if (compiled := compiled_call(model)) is not None:
            # Around the compiled function: in it, hooks would be compiled as well.
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
            # Which output backward starts from is not known: the first gradient that arrives at any of them counts.
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)
        if self._trains:
            self._steps.forward_ends()
        else:
            self._steps.idle_forward(is_over=True, is_training=model.training)

    def _backward_begins(self, _: Tensor) -> None:
        """See [Note: the end of backward]; on CUDA this is a thread of autograd's."""
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
        """Return what ``call`` returns, and report how long that took; ``size`` returns the samples in it.

        What ends the iteration, or fails, is not reported; nor is what is asked for within such a call.
        """
        if self._is_within or not self._steps.is_mine:
            return call()  # a loader that iterates another one: the outer one is what the loop waits for
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
        """Yield what ``batches`` yields."""
        iterator = self._timed(lambda: iter(batches), lambda _: None)
        while True:
            try:
                batch = self._timed(lambda: next(iterator), num_samples)
            except StopIteration:
                return
            yield batch

    def watch_loaders(self, loaders: Sequence[DataLoader[Any]] | None) -> None:
        """Watch these DataLoaders, or all of the process."""
        chosen: weakref.WeakSet[Any] = weakref.WeakSet()
        for each in loaders or ():
            chosen.add(getattr(each, "base_dataloader", None) or each)  # Accelerate's loaders iterate one within
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
        """Watch these, or if ``None`` all that update one of ``models``, of which there may be more later."""
        self._are_ours.update(dict.fromkeys(optimizers or (), True))
        self._updated = models if optimizers is None else ()
        self._undo.callback(register_optimizer_step_pre_hook(Hook(self._optimizer_begins, self._fail)).remove)
        self._undo.callback(register_optimizer_step_post_hook(Hook(self._optimizer_ends, self._fail)).remove)
        original = GradScaler.step
        begins, fails = Hook(self._steps.optimizer_begins, self._fail), Hook(self._steps.optimizer_failed, self._fail)
        ends = Hook(self._scaled, self._fail)

        # It skips an optimizer's step whose gradient is not finite.
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
        if in_backward():  # in whatever thread that runs
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
    """Return the compiled function to which calls of a module go, hooks and all, as ``module.compile()`` has it."""
    return module._compiled_call_impl


def _batch_size(loader: Any) -> int | None:
    """Return how many samples a batch of a loader has; None if its sampler decides."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def num_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return how many samples a batch holds: the length of the first dimension of its first tensor; 0 without any.

    Args:
        batch: As a loader gives it, or the arguments of a forward.
        batch_size: What the loader was asked for: a list of so many items is one of samples.
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
    """Return the learning rate of the first group; None if there is none, or only the device knows it."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) else float(rate)
