"""How torch.compile and CUDA graph capture treat the functions of the engines."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def leave_uncompiled(function: _Function) -> _Function:
    """Make torch.compile run ``function`` as it is and compile the frames that it calls."""
    # ``torch.compiler.disable(recursive=False)`` does the same, but its first call imports the compiler, which costs
    # seconds, also for those who never compile.
    _set_strategy(function, for_callees=torch._C._dynamo.eval_frame._FrameAction.DEFAULT)
    return function


def leave_all_uncompiled(function: _Function) -> _Function:
    """Make torch.compile run ``function`` and the frames that it calls as they are: it cannot trace collectives."""
    _set_strategy(function, for_callees=torch._C._dynamo.eval_frame._FrameAction.SKIP)
    return function


def keep_out_of_graphs(function: _Function) -> _Function:
    """Make torch.compile end a graph before each call of ``function``, run it as it is, and go on behind it.

    Not around another decorator, whose code others share.
    """
    # The functions above do so for frames that are entered from outside a graph; the attribute does it for a module's
    # forward, too, which the compiler would otherwise inline. Autograd calls hooks where a compiled step runs its
    # backward, so these need it as well.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return leave_all_uncompiled(function)


def _set_strategy(function: Callable[..., Any], *, for_callees: Any) -> None:
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, for_callees)
    frames.set_code_exec_strategy(function.__code__, strategy)


def is_capturing(device: torch.device) -> bool:
    """Return whether what goes to the current stream of ``device`` is recorded into a graph; see [Note: capture].

    [Note: capture]
    While a CUDA graph is recorded, hooks and callbacks run once, and everything they put on streams is recorded with
    it: the copies into the buckets, the all-reduces (NCCL joins the capture), the waits of streams for each other. In a
    replay no Python runs, and the host must not look at the device. So by then the buckets must be the final ones: as
    with torch's class, some steps are run before the capture, on a side stream in which the wrapper was made.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
