"""Compiled modules: let a replica run its own compiled code, not that of the original."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

_COMPILES_IN_THREADS = TorchVersion(torch.__version__) >= "2.13"
"""torch 2.11 crashes the process when two threads compile at the same time, with or without this package."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returns for a module. Does not import the compiler."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def compiled_forward(module: Any, inner: nn.Module) -> Callable[..., Any]:
    """Compile ``inner``, a replica of what ``module`` compiles, with the options of ``module``.

    A compiled module calls through an attribute that is bound to the original, which a replica must not use. Where
    torch cannot compile in several threads, ``inner`` runs as it is written.
    """
    forward: Callable[..., Any] = module.dynamo_ctx(inner).forward if _COMPILES_IN_THREADS else inner.__call__
    return forward
