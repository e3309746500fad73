"""How torch.compile treats the frames of a wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def leave_uncompiled(function: _Function) -> _Function:
    """Make torch.compile run ``function`` as it is and compile the frames that it calls.

    ``torch.compiler.disable(recursive=False)`` does the same, but its first call imports the compiler, which costs
    seconds, also for those who never compile.
    """
    frames = torch._C._dynamo.eval_frame
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, as_it_is)
    return function
