"""Hooks on models, loaders and optimizers of a training loop, which never harm the program they watch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from lockstep.parallel.compile import is_capturing
from lockstep.parallel.ddp.module_io import find_tensors
from lockstep.telemetry.run_record import Reduction

# Hooks that never harm the program they watch: errors of ours end the watching, and copies of a hook do nothing.


class Hook:
    """Calls ``listener`` and returns nothing; passes an error of it to ``fail``.

    Within a function that is compiled it does nothing. Copies and pickles of it do nothing either: a copy of a model
    that is watched, such as one for averaged weights, is not watched.

    Args:
        listener: What to call.
        fail: What to call with an error.
    """

    __torch_unserializable__ = True
    """Tells torch not to warn that tensors are pickled without it."""

    def __init__(
        self, listener: Callable[..., object] | None = None, fail: Callable[[Exception], None] | None = None
    ) -> None:
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


# How many samples a batch holds, as far as it shows: the length of its first dimension.


def num_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return the length of the first dimension of the first tensor in ``batch``; 0 if there is none.

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


# Hooks on models and on what they return: when forward and backward begin and end.
#
# [Note: the end of backward]
# When the first gradient comes to what a model has returned, its backward begins, and a callback is put at its end.
# Autograd calls those in the order in which they were put there. torch's DistributedDataParallel puts the one in
# which it waits for its buckets there when the last of them is on its way, so later: ours sees this rank's own work
# done. Then it puts a second one behind all others, which sees the gradients reduced. On CUDA both are called with
# the streams of backward waited for, so that events tell the same of the device.

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
        self, steps: Steps, device: torch.device, take_stamps: Callable[[], list[Reduction]], fail: Fail
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


# How long a loop waits for the batches of a DataLoader, seen at the loader or at all of them.

Undo = Callable[[], None]


class Batches:
    """Tells of batches that are asked for and come.

    Args:
        steps: Is told.
        device: Where the model is.
        fail: Gets errors of ours.
    """

    def __init__(self, steps: Steps, device: torch.device, fail: Fail) -> None:
        self._steps, self._device, self._fail = steps, device, fail
        self._is_cuda = device.type == "cuda"
        self._is_within = False

    def timed(self, call: Callable[[], Any], size: Callable[[Any], int | None]) -> Any:
        """Return what ``call`` returns, and tell how long that took; ``size`` tells the samples in it.

        What ends the iteration, or fails, is not told; nor is what is asked for within such a call.
        """
        if self._is_within or not self._steps.is_mine or (self._is_cuda and is_capturing(self._device)):
            return call()
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
        iterator = self.timed(lambda: iter(batches), lambda _: None)
        while True:
            try:
                batch = self.timed(lambda: next(iterator), num_samples)
            except StopIteration:
                return
            yield batch


def watch_loader(loader: DataLoader[Any], batches: Batches) -> Undo:
    """Have ``batches`` told of each iteration of this loader that begins from now on; return what undoes that.

    Nothing that is put there keeps the loader or its iterators alive: loader processes end when they always did.
    """
    inner = getattr(loader, "base_dataloader", None)  # Accelerate's iterate one within
    loader = inner if isinstance(inner, DataLoader) else loader
    kind, known = type(loader), weakref.ref(loader)

    def get_iterator() -> Any:
        owner = known()
        iterator = batches.timed(lambda: kind._get_iterator(owner), lambda _: None)  # type: ignore[arg-type]
        Hook(lambda: _watch_iterator(iterator, batches, _batch_size(owner)), batches._fail)()
        return iterator

    loader._get_iterator = get_iterator  # type: ignore[method-assign]

    def undo() -> None:
        if (owner := known()) is not None:
            owner.__dict__.pop("_get_iterator", None)

    return undo


def _watch_iterator(iterator: Any, batches: Batches, batch_size: int | None) -> None:
    known = weakref.ref(iterator)
    original = type(iterator)._next_data

    def next_data() -> Any:
        return batches.timed(lambda: original(known()), lambda batch: num_samples(batch, batch_size))

    iterator._next_data = next_data


def watch_all_loaders(batches: Batches) -> Undo:
    """Have ``batches`` told of each DataLoader of the process; return what undoes that."""
    began, came = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    @functools.wraps(began)
    def begin(loader: DataLoader[Any]) -> Any:
        iterator = batches.timed(lambda: began(loader), lambda _: None)
        Hook(lambda: sizes.__setitem__(iterator, _batch_size(loader)), batches._fail)()
        return iterator

    @functools.wraps(came)
    def following(iterator: Any) -> Any:
        return batches.timed(lambda: came(iterator), lambda batch: num_samples(batch, sizes.get(iterator)))

    sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
    owner: Any = DataLoader
    iterators: Any = _BaseDataLoaderIter
    owner.__iter__, iterators.__next__ = begin, following

    def undo() -> None:
        if owner.__iter__ is begin:
            owner.__iter__ = began
        if iterators.__next__ is following:
            iterators.__next__ = came

    return undo


def _batch_size(loader: Any) -> int | None:
    """Return how many samples a batch of a loader has, as far as it says."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


# Hooks on optimizers, and on torch's GradScaler, which keeps an optimizer from a step whose gradient is not finite.


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
