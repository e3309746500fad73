"""What each fault does to the rank that it strikes."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

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
    name, parameter = _middle(model)
    return ".".join(part for part in name.split(".") if part != "module"), parameter


def _middle(model: nn.Module) -> tuple[str, Tensor]:
    trained = [(name, found) for name, found in model.named_parameters() if found.requires_grad and found.numel()]
    return trained[len(trained) // 2]


class WholeParameters:
    """The parameters that models compute with: of what fully_shard has divided they are others than the model's own.

    Only on those do hooks run in backward. They are in the place of the model's own while its modules compute.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], weakref.ref[Tensor]] = {}

    def follow(self) -> None:
        """Take note of them from now on, for good."""
        register_module_forward_hook(self._on_forward)

    def _on_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and not _is_divided(parameter):
                self._found[id(module), name] = weakref.ref(parameter)

    def middle(self, model: nn.Module) -> Tensor | None:
        """Return the one in the middle of ``model`` that its last forward computed with, if that is known."""
        name, parameter = _middle(model)
        if not _is_divided(parameter):
            return parameter
        path, _, leaf = name.rpartition(".")
        found = self._found.get((id(model.get_submodule(path)), leaf))
        return None if found is None else found()


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


def _is_divided(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")  # a DTensor, whose module takes long to import


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if _is_divided(parameter) else parameter  # type: ignore[no-any-return]
