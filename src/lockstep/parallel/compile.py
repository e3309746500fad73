"""How torch.compile treats the functions of the engines."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.base.torch_internals import end_graph_at, leave_frames, set_compiled_call

_Function = TypeVar("_Function", bound=Callable[..., Any])


def leave_uncompiled(function: _Function) -> _Function:
    """Make torch.compile run ``function`` as it is, outside of graphs, and compile the frames that it calls."""
    # `leave_frames` does so for frames that are entered from outside a graph. The attribute also does it for a module's
    # forward, which the compiler would otherwise inline.
    end_graph_at(function)
    leave_frames(function, and_callees=False)
    return function


def keep_out_of_graphs(function: _Function) -> _Function:
    """Make torch.compile end a graph before each call of ``function``, run it as it is, and start a new graph after it.

    The frames that it calls run uncompiled, too, since the compiler cannot trace collectives. Do not use it around
    another decorator, because other functions share that decorator's code.
    """
    end_graph_at(function)  # for hooks: autograd calls them while a compiled step runs its backward
    leave_frames(function, and_callees=True)
    return function


@functools.cache
def _compiled_for(_: tuple[Any, ...], is_exact: bool) -> Callable[..., Any]:
    def run(call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*inputs, **kwargs)

    # The compiler keeps what it has compiled, up to a number, by the code object, which all calls here would share.
    run.__code__ = run.__code__.replace()
    return torch.compile(run, dynamic=False if is_exact else None)


def compile_in_place(module: nn.Module, *splits: object, is_exact: bool, in_hooks: bool = False) -> None:
    """Compile ``module`` when it is called: its class, names, attributes and state stay as they are.

    What was compiled for an equal module serves this one, too.

    Args:
        module: The model, or a part of it; it can still be wrapped.
        splits: What determines where graphs end, which the compiler does not compare when it looks for a graph.
        is_exact: Make one graph for each shape of inputs, and never run uncompiled. Code for several shapes may depend
            on the first of them, which differs between ranks. False: the first dimension may vary in a graph.
        in_hooks: Leave out its hooks, at which graphs would end; copies are then not possible.
    """
    compiled = _compiled_for((type(module), *splits), is_exact)
    set_compiled_call(module, compiled, is_exact=is_exact, in_hooks=in_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` is the result of ``torch.compile``. Does not import the compiler, which takes long."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    return "frames" in getattr(sys.modules.get("torch._dynamo.utils"), "counters", ())
