"""A synchronised step that this rank has not the memory for: how its engine takes part in what the others exchange.

[Note: leaving a step]
The others wait in the collectives of backward, and go on to the step's verdict when these are complete. Our engine is
closed from outside: its buckets leave with what has come, and zeros. torch's can only be led to its end by gradients.
So a loss of no samples, which has the parameters in its graph and no gradient for them, is differentiated in the place
of what failed: that of the whole module if forward did not return, and else that of the parameters whose gradients have
not come, since each may come once only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import override

from lockstep.errors import OutOfMemory
from lockstep.parallel.ddp.reducer import abort_step
from lockstep.train.step import is_ours, no_samples


class HalfDone(ABC):
    """Ends a step that an out-of-memory error has cut short on this rank. Abstract; see `half_done`."""

    @abstractmethod
    def finish(self) -> None:
        """Take part in the exchange of gradients; those that it leaves are of no use on any rank.

        Collective: every other rank runs its synchronised backward. Blocks until complete.
        """


def half_done(module: nn.Module) -> HalfDone:
    """Return what ends steps of ``module``, which is our `DistributedDataParallel` or torch's."""
    return OfOurs(module) if is_ours(module) else OfTorch(module)


@final
class OfOurs(HalfDone):
    """Of our `DistributedDataParallel`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @override
    def finish(self) -> None:
        """Collective: every rank. Blocks."""
        abort_step(self._module)


class _Stage(Enum):
    CALLED = "called"  # the wrapper exchanges buffers, or has not begun to
    ENTERED = "entered"  # the model computes
    RETURNED = "returned"  # forward is over; its backward is not synchronised
    ARMED = "armed"  # forward is over, and the reducer counts the gradients that come


@final
class OfTorch(HalfDone):
    """Of torch's, around a `LossModule`: follows where in a step it is.

    Args:
        module: The wrapper.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._arrived: set[int] = set()
        self._stage = _Stage.CALLED
        module.register_forward_pre_hook(self._on_call)
        module.module.register_forward_pre_hook(self._on_entry)
        module.register_forward_hook(self._on_return)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_call(self, *_: Any) -> None:
        self._stage = _Stage.CALLED

    def _on_entry(self, *_: Any) -> None:
        self._stage = _Stage.ENTERED

    def _on_return(self, *_: Any) -> None:
        self._stage = _Stage.ARMED if self._module.require_backward_grad_sync else _Stage.RETURNED
        self._arrived.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._arrived.add(id(parameter))

    @override
    def finish(self) -> None:
        """Collective: every rank. Blocks.

        Raises:
            OutOfMemory: It happened before the model was called, where others wait for this rank's buffers.
        """
        if self._stage is _Stage.CALLED:
            raise OutOfMemory(
                "Memory ran out before the model was called, where torch's DistributedDataParallel cannot be led on.\n"
                "Set accumulate by hand, or use strategy ddp."
            )
        if self._stage is _Stage.ARMED:
            missing = [parameter for parameter in self._parameters if id(parameter) not in self._arrived]
            if missing:
                no_samples(missing).backward()
            return
        self._module.require_forward_param_sync = False  # buffers were exchanged when the model was called first
        self._module(None, 0).value.backward()
