"""A divided optimizer in the place of a bare one."""

from __future__ import annotations

from torch.optim import Optimizer

from lockstep.comm.collectives import Group
from lockstep.comm.slices import scatters
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.parallel.zero.recipe import Recipe


def divide(optimizer: Optimizer, *, group: Group) -> ZeroRedundancyOptimizer:
    """Return an optimizer that does what ``optimizer``, which has made no step yet, would do; divided among the ranks.

    Its parameters' gradients are averaged by a `DistributedDataParallel`, in slices where that pays.

    Collective: every rank of ``group``. Blocks.

    Raises:
        ConfigurationError: It cannot be made anew from its class and its param groups, or cannot be divided.
    """
    recipe = Recipe.of(optimizer)
    device = optimizer.param_groups[0]["params"][0].device
    return ZeroRedundancyOptimizer(
        [dict(param_group) for param_group in optimizer.param_groups],
        type(optimizer),
        process_group=group,
        shard_gradients=recipe.elementwise and scatters(group, device),
        **recipe.defaults,
    )
