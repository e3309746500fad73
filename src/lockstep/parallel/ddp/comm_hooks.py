"""Check communication hooks, and find the Python form of torch's built-in ones."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lockstep.comm.collectives import BuiltinCommHookType, GradBucketType, overlapped_optimizer, stock_comm_hooks
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.transport import CommHook

__all__ = ["builtin_comm_hook", "check_comm_hook", "overlapped_optimizer"]


def check_comm_hook(hook: Any, wire_dtype: torch.dtype | None) -> None:
    """Refuse what cannot be a hook, with torch's error types and texts.

    Raises:
        ConfigurationError: Gradients are to be sent in ``wire_dtype``, which is the hook's to decide.
        TypeError: It is not callable.
        ValueError: Its annotations say that it expects or returns something else.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if wire_dtype is not None:
        raise ConfigurationError(
            f"A communication hook decides itself in what gradients travel, but wire_dtype={wire_dtype} was given.\n"
            "Leave one of the two out."
        )
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, GradBucketType, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]) and not isinstance(returned, str):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def builtin_comm_hook(kind: Any) -> CommHook:
    """Return the hook for torch's ``BuiltinCommHookType``; its state is the process group.

    Raises:
        ConfigurationError: It is neither ALLREDUCE nor FP16_COMPRESS.
    """
    stock = stock_comm_hooks()
    hooks: dict[Any, CommHook] = {
        BuiltinCommHookType.ALLREDUCE: stock.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: stock.fp16_compress_hook,
    }
    if kind in hooks:
        return hooks[kind]
    raise ConfigurationError(f"Unknown built-in communication hook: {kind!r}.\nUse ALLREDUCE or FP16_COMPRESS.")
