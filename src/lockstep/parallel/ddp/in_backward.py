"""Optimizers that run inside backward, set up with ``torch.distributed.optim._apply_optimizer_in_backward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from lockstep.comm.collectives import in_backward_hooks


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> Callable[[], None] | None:
    """Return what runs the parameters' own optimizers and frees their gradients; None if they have none.

    Torch's hooks, which would step as soon as this rank's gradient is there, are removed: the optimizers are to be
    run when the gradients have been averaged.
    """
    ours = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in ours:
        for handle in in_backward_hooks(parameter):
            handle.remove()

    def step() -> None:
        for parameter in ours:
            for optimizer in parameter._in_backward_optimizers:
                optimizer.step()
            parameter.grad = None

    return step if ours else None
