"""What each fault does to the rank that it strikes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OOM_TEXT = "Tried to allocate 20.00 GiB: out of memory (made up by lockstep rehearse)."

_NAP_S = 3600.0


def kill() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(seconds: float) -> None:
    """Do nothing for so long."""
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, _NAP_S))


def run_out_of_memory() -> None:
    """Raise what torch raises then."""
    raise torch.OutOfMemoryError(OOM_TEXT)


def flip_bit(model: nn.Module) -> str:
    """Flip one bit of one number of a parameter in the middle of the model; return which."""
    name, parameter = middle_parameter(model)
    numbers = _local(parameter).detach()
    first = (0,) * numbers.ndim
    changed = numbers[first].clone().reshape(1)
    # Of the second most significant byte: large enough to see, far too small to become infinite.
    changed.view(torch.uint8)[-2] ^= 0b0100_0000
    numbers[first] = changed[0]
    return name


def middle_parameter(model: nn.Module) -> tuple[str, Tensor]:
    """Return the name of a parameter in the middle of the model, without the wrappers' prefixes, and it."""
    trained = [(name, found) for name, found in model.named_parameters() if found.requires_grad and found.numel()]
    name, parameter = trained[len(trained) // 2]
    return ".".join(part for part in name.split(".") if part != "module"), parameter


def has_hooks(parameter: Tensor) -> bool:
    """Say whether hooks on a parameter run in backward: not on what fully_shard left of it."""
    return not hasattr(parameter, "to_local")


def in_backward(parameter: Tensor, act: Callable[[Tensor], Tensor | None]) -> None:
    """Act once, when this backward computes the gradient of ``parameter``, which the act may replace."""
    handles: list[Any] = []

    def once(gradient: Tensor) -> Tensor | None:
        handles.pop().remove()
        return act(gradient)

    handles.append(parameter.register_hook(once))


def not_a_number(gradient: Tensor) -> Tensor:
    """Return the gradient with one number that is none."""
    broken = gradient.clone()
    broken.view(-1)[:1] = float("nan")
    return broken


def _local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
