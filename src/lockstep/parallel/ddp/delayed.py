"""Parameters whose reduction waits for another parameter's gradient (``delay_all_reduce_named_params``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, all_reduce_async, broadcast_coalesced


class DelayedReduction:
    """Reduces the gradients of the parameters as soon as ``trigger`` receives its own.

    As with torch's class, it is for the caller to choose a trigger that comes last. The end of that backward waits.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]], trigger: torch.nn.Parameter, *, group: Group
    ) -> None:
        self._parameters = [parameter for _, parameter in named_parameters]
        self._group = group
        broadcast_coalesced([parameter.detach() for parameter in self._parameters], group=group)
        self._handle = trigger.register_hook(self._reduce)

    def _reduce(self, gradient: Tensor) -> Tensor:
        pending: list[Future[Any]] = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(self._group.size())
            pending.append(all_reduce_async(parameter.grad, group=self._group))

        def wait() -> None:
            for future in pending:
                future.wait()

        torch.autograd.Variable._execution_engine.queue_callback(wait)
        return gradient
