"""``backward`` with a weight, for the loops of one's own that need not know what their model is wrapped in."""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.ballot import check_weight
from lockstep.parallel.ddp.neighbours import live_reducers


def backward(loss: Tensor, *, count: float | Tensor) -> None:
    """Run ``loss.backward()`` with the weight ``count`` for each wrapped model that it reaches.

    It is short for ``model.weight(count)`` on every ``DistributedDataParallel`` that takes part, and
    ``loss.backward()``; see there for what a weight does. One call per micro-batch.

    Collective: every rank, if the backward is synchronised; then it blocks as that does.

    Args:
        loss: A scalar: the mean loss of this rank's micro-batch, also scaled by a ``GradScaler``.
        count: How many samples, tokens or whatever it is the mean of: a finite number, 0 or more, or a tensor with no
            dimensions.

    Raises:
        ConfigurationError: ``count`` is nothing of that kind, or the backward reached no wrapped model. On every
            rank: some ranks gave a weight and others did not; names the latter.
    """
    weight = check_weight(count)
    reducers = [reducer for reducer in live_reducers if reducer.has_run]
    for reducer in reducers:
        reducer.weigh(weight)
    try:
        loss.backward()
    finally:
        num_left_out = sum(reducer.withdraw() for reducer in reducers)
    if num_left_out == len(reducers):
        raise ConfigurationError(
            "The backward reached no model that is wrapped in DistributedDataParallel, so the count had no effect.\n"
            "Compute the loss with the wrapped model, not with its .module, or call loss.backward()."
        )
