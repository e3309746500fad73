"""Compiled modules: let a replica run its own compiled code, not that of the original."""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returns for a module. Does not import the compiler."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def compiled_forward(module: Any, inner: nn.Module) -> Callable[..., Any]:
    """Compile ``inner``, a replica of what ``module`` compiles, with the options of ``module``.

    A compiled module calls through an attribute that is bound to the original, which a replica must not use.
    """
    forward: Callable[..., Any] = module.dynamo_ctx(inner).forward
    return forward
