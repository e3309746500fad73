"""Parameters whose reduction waits for another parameter's gradient (``delay_all_reduce_named_params``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, all_reduce_async, broadcast_coalesced
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.reducer import Reducer


class DelayedReduction:
    """Reduces the gradients of the parameters as soon as ``trigger`` receives its own.

    As with torch's class, it is for the caller to choose a trigger that comes last. The end of that backward waits.
    With weights, ``no_sync()`` holds these gradients back as it does all others; see [Note: weights] in window.py.

    Args:
        named_parameters: Those that wait.
        trigger: What they wait for.
        reducer: What reduces the others.
        group: The ranks that take part.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter,
        *,
        reducer: Reducer,
        group: Group,
    ) -> None:
        self._parameters = [parameter for _, parameter in named_parameters]
        self._reducer = reducer
        self._first_index = len(reducer.row.parameters)
        self._group = group
        reducer.companions = self._parameters
        if not reducer.row.parameters:
            reducer.weights.refusal = (
                "Weights need a parameter whose gradient is not delayed, but delay_all_reduce_named_params holds all.\n"
                "Leave one out."
            )
        broadcast_coalesced([parameter.detach() for parameter in self._parameters], group=group)
        self._handle = trigger.register_hook(self._reduce)

    @torch.no_grad()
    @keep_out_of_graphs
    def _reduce(self, gradient: Tensor) -> Tensor:
        window = self._reducer.weights.window
        is_weighed = window is not None and window.is_weighed
        if is_weighed and not self._reducer.is_collecting:
            return gradient
        factor = 1.0
        if is_weighed:
            assert window is not None, "weights without a window"
            window.leave(range(self._first_index, self._first_index + len(self._parameters)), ())
            factor = window.unit
        pending: list[Future[Any]] = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if is_weighed:
                parameter.grad.mul_(factor)
            parameter.grad.div_(self._group.size())
            pending.append(all_reduce_async(parameter.grad, group=self._group))

        @keep_out_of_graphs
        def wait() -> None:
            for future in pending:
                future.wait()
            if is_weighed and self._reducer.weights.sum:  # known by now: the reducer asked to be called back before us
                for parameter in self._parameters:
                    assert parameter.grad is not None, "a gradient was removed while it was reduced"
                    parameter.grad.mul_(self._group.size() / self._reducer.weights.sum)

        torch.autograd.Variable._execution_engine.queue_callback(wait)
        return gradient
