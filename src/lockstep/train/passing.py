"""The gradients of this rank while backward computes them, where only sums over the ranks are left of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.fully_shard import is_divided


class Passing:
    """What was seen of the gradients that have passed.

    Args:
        names: Of all parameters, in the order of the model.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._not_finite: set[str] = set()

    def look(self, name: str, parameter: Tensor) -> None:
        """Take note of a parameter whose gradient has come. Blocks."""
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            self._not_finite.add(name)

    @property
    def first(self) -> str | None:
        """The first parameter of the model whose gradient was not finite."""
        return next((name for name in self._names if name in self._not_finite), None)


@contextmanager
def watching_gradients(model: nn.Module) -> Iterator[Passing]:
    """Within, look at each gradient that backward computes on this rank.

    Of a model whose parameters are divided among the ranks, those with which it computes are whole, and are there when
    the module that has them returns.
    """
    names: dict[tuple[int, str], str] = {}
    for path, module in model.named_modules():
        for name in module._parameters:
            names[id(module), name] = f"{path}.{name}" if path else name
    passing = Passing([name for name, _ in model.named_parameters()])
    watched: set[int] = set()
    handles: list[Any] = []

    def watch(module: nn.Module, _inputs: Any, _output: Any) -> None:
        for inner in module.modules():
            for name, parameter in inner._parameters.items():
                known = names.get((id(inner), name))
                if known is None or parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in watched and not is_divided(parameter):
                    watched.add(id(parameter))
                    handles.append(parameter.register_post_accumulate_grad_hook(partial(passing.look, known)))

    handles.append(nn.modules.module.register_module_forward_hook(watch))
    try:
        yield passing
    finally:
        for handle in handles:
            handle.remove()
