"""Hooks on models, loaders, optimizers and collectives of code that is not ours, and the one way to remove them.

`monitor`, `rehearse` and `verify` use it. It reports when something happens; the listeners know what that means::

    with Instrument() as instrument:
        instrument.optimizers(before, after)
        instrument.replace(random, "random", lambda: 0.5)
    # here torch and random are as they were
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lockstep.base import torch_internals

Listener = Callable[..., object]
Fail = Callable[[Exception], None]

# Methods of a process group that send or receive data, or wait for other ranks; also the older private names.
_COLLECTIVE = re.compile(r"_?(all|reduce|broadcast|barrier|gather|scatter|send|monitored)")


class Hook:
    """Calls ``listener`` and returns nothing; passes its errors to ``fail``, so that they do not affect the program.

    Does nothing while a function is compiled. Copies and pickles do nothing, so that a copy of an observed model, such
    as one for averaged weights, is not observed.
    """

    # Suppresses torch's warning that tensors are pickled without the hook.
    __torch_unserializable__ = True

    def __init__(self, listener: Listener | None = None, fail: Fail | None = None) -> None:
        self._listener, self._fail = listener, fail

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the listener."""
        if torch.compiler.is_compiling() or self._listener is None or self._fail is None:
            return
        try:
            self._listener(*args, **kwargs)
        except Exception as error:
            self._fail(error)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Instrument(ExitStack):
    """Hooks of this process; ``close()``, or the end of a ``with`` block, removes them all, the last one first.

    Each method adds hooks and may be called any number of times. Nothing here is collective, and nothing blocks.

    Args:
        fail: Gets the errors of listeners. Without it, a listener is called directly: what it raises ends the program's
            call, and what the hook of a tensor returns replaces the gradient, as with hooks of torch.
    """

    def __init__(self, fail: Fail | None = None) -> None:
        super().__init__()
        self._fail = fail

    def _hook(self, listener: Listener) -> Callable[..., Any]:
        return listener if self._fail is None else Hook(listener, self._fail)

    # --- any attribute ------------------------------------------------------------------------------------------------

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module, a class or an object; undone unless other code has replaced it since."""
        is_own, original = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if is_own:
                setattr(owner, name, original)
            else:  # it was inherited
                delattr(owner, name)

        self.callback(undo)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by one that returns ``around(function, *args, **kwargs)``.

        Errors of ``around`` reach the program, also with ``fail``.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.replace(owner, name, call)

    def before(self, owner: Any, name: str, listener: Listener) -> None:
        """Call ``listener(*args, **kwargs)`` before each call of a function, with its arguments."""
        hook = self._hook(listener)

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            hook(*args, **kwargs)
            return original(*args, **kwargs)

        self.wrap(owner, name, around)

    # --- models -------------------------------------------------------------------------------------------------------

    def forwards(self, model: nn.Module, begins: Listener, ends: Listener) -> None:
        """Call ``begins(model, args, kwargs)`` and ``ends(model, args, kwargs, output)`` at the forwards of a model."""
        before, behind = self._hook(begins), self._hook(ends)
        if (compiled := compiled_call(model)) is not None:
            # Around the compiled function, as hooks inside would be compiled.
            def call(*args: Any, **kwargs: Any) -> Any:
                before(model, args, kwargs)
                output = compiled(*args, **kwargs)
                behind(model, args, kwargs, output)
                return output

            self.replace(model, torch_internals.COMPILED_CALL, call)
        else:
            self.callback(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            self.callback(model.register_forward_hook(behind, with_kwargs=True).remove)

    def all_forwards(self, begins: Listener, ends: Listener) -> None:
        """Call ``begins(module, args)`` and ``ends(module, args, output)`` at the forwards of all modules.

        They are called before hooks of the module itself, so ``ends`` sees the whole parameters of ``fully_shard``.
        torch warns of such hooks when it calls a compiled model; ``before(nn.Module, "__call__", ...)`` avoids that.
        """
        self.callback(register_module_forward_pre_hook(self._hook(begins)).remove)
        self.callback(register_module_forward_hook(self._hook(ends)).remove)

    # [Note: the end of backward]
    # A backward begins with the first gradient of an output of the model. Then a callback is queued for its end.
    # Autograd calls such callbacks in order. torch's DistributedDataParallel queues the callback that waits for its
    # buckets later, when the last bucket has been launched, so ours is called at the end of this rank's own work. It
    # then queues a second callback after all others, which is called when the gradients are reduced. On CUDA, both are
    # called after waiting for the streams of backward, so events mark the same moments on the device.

    def backward(
        self, begins: Listener, own_work_done: Listener, ends: Listener, *, is_watching: Callable[[], bool]
    ) -> Callable[[Tensor], None]:
        """Return a hook for the outputs of a forward (``tensor.register_hook``), which reports their backward.

        Each backward calls ``begins()`` at its first gradient, in a thread of autograd on CUDA, ``own_work_done()``
        and ``ends()``; see [Note: the end of backward]. Nothing is called while ``is_watching()`` is false.
        """
        task = -1
        at_end = self._hook(ends)

        def finish() -> None:
            own_work_done()
            torch_internals.queue_callback(at_end)

        at_own_end = self._hook(finish)

        def first_gradient(_: Tensor) -> None:
            nonlocal task
            current = torch_internals.current_graph_task_id()
            if current in (-1, task) or not is_watching():
                return
            task = current
            begins()
            torch_internals.queue_callback(at_own_end)

        return self._hook(first_gradient)

    # --- loaders ------------------------------------------------------------------------------------------------------

    def loaders(self, around: Callable[..., Any], chosen: Sequence[DataLoader[Any]] | None = None) -> None:
        """Call ``around(fetch, batch_size)`` at each start of a DataLoader and each request for a batch.

        It must return ``fetch()``. Loaders may be nested: then a ``fetch`` contains further calls of ``around``.

        Args:
            around: ``fetch()`` returns the iterator or the batch. The batch size is ``None`` at the start, and if a
                sampler defines it.
            chosen: Only these loaders; all of the process by default.
        """
        # Weak references, so that loaders, iterators and their processes end as without hooks.
        sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        # Accelerate's loaders contain one.
        observed = weakref.WeakSet(getattr(loader, "base_dataloader", None) or loader for loader in chosen or ())

        def start(original: Callable[..., Any], loader: Any) -> Any:
            if chosen is not None and loader not in observed:
                return original(loader)
            iterator = around(lambda: original(loader), None)
            size = getattr(loader.batch_sampler, "batch_size", None)
            sizes[iterator] = size if isinstance(size, int) else None
            return iterator

        def fetch(original: Callable[..., Any], iterator: Any) -> Any:
            if chosen is not None and iterator not in sizes:
                return original(iterator)
            return around(lambda: original(iterator), sizes.get(iterator))

        self.wrap(DataLoader, "__iter__", start)
        self.wrap(torch_internals.BaseDataLoaderIter, "__next__", fetch)

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def optimizers(self, begins: Listener, ends: Listener) -> None:
        """Call ``begins(optimizer, args, kwargs)`` and ``ends(...)`` at the steps of all optimizers.

        They must not close this: torch iterates over its hooks while it calls them.
        """
        self.callback(register_optimizer_step_pre_hook(self._hook(begins)).remove)
        self.callback(register_optimizer_step_post_hook(self._hook(ends)).remove)

    # --- collectives --------------------------------------------------------------------------------------------------

    def collectives(self, before: Listener, *, in_ddp: bool = True) -> None:
        """Call ``before(name, group, *args, **kwargs)`` before the collectives of all groups, with their arguments.

        torch's DistributedDataParallel starts its collectives in C++, where no hook sees them. It gets, in its first
        forward, the communication hook with which it does the same from Python; torch cannot remove that again.
        """
        from lockstep.comm.collectives import Group, stock_comm_hooks
        from lockstep.comm.shm.process_group import CpuProcessGroup, ShmProcessGroup

        for kind in (Group, CpuProcessGroup, ShmProcessGroup):
            for name in filter(_COLLECTIVE.match, list(vars(kind))):

                def call(group: Any, *args: Any, _kind: Any = kind, _name: str = name, **kwargs: Any) -> None:
                    # Once, if the method of a derived class calls this one.
                    if _kind is next(base for base in type(group).__mro__ if _name in vars(base)):
                        before(_name, group, *args, **kwargs)

                self.before(kind, name, call)
        if not in_ddp:
            return

        def hook_torchs(module: nn.Module, _: Any) -> None:
            # By name, as --adopt puts our class in the place of torch's.
            kind = type(module)
            is_torchs = kind.__module__.startswith("torch.") and kind.__name__ == "DistributedDataParallel"
            if is_torchs and not torch_internals.comm_hooks_of(module):
                module.register_comm_hook(module.process_group, stock_comm_hooks().allreduce_hook)  # type: ignore[operator]

        self.callback(register_module_forward_pre_hook(self._hook(hook_torchs)).remove)


def in_backward() -> bool:
    """Return whether this thread runs a backward, which may recompute forwards."""
    return torch_internals.current_graph_task_id() != -1


def compiled_call(module: nn.Module) -> Any:
    """Return the function set by ``module.compile()``, which calls module and hooks; None if there is none."""
    return getattr(module, torch_internals.COMPILED_CALL, None)
