"""Strategy ``ddp-zero1``: our `DistributedDataParallel` with an optimizer that is divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.comm.collectives import Group, all_reduce
from lockstep.comm.slices import scatters
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch
from lockstep.parallel.ddp.bucket_stamps import BucketStamps
from lockstep.parallel.flat_math import are_finite, multiply_
from lockstep.parallel.zero.clip import norm_of_slices
from lockstep.parallel.zero.like import divide
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train.gradients import Gradients
from lockstep.train.half_done import HalfDone
from lockstep.train.objective import Objective
from lockstep.train.strategy import Distributed, Pass, Strategy


@final
class SliceGradients(Gradients):
    """Gradients of which each rank has its part; the same norm on every rank.

    Args:
        local: Returns this rank's part.
        like: A parameter.
        group: The ranks.
    """

    def __init__(self, local: Callable[[], list[Tensor]], like: Tensor, group: Group) -> None:
        self._local, self._like, self._group = local, like, group

    @override
    def expect_norm(self) -> None:
        """Do nothing: there is no earlier."""

    @override
    def norm(self) -> Tensor:
        """Collective: every rank."""
        return norm_of_slices(self._local(), self._like, group=self._group)

    @override
    def multiply_(self, factor: Tensor) -> None:
        multiply_(self._local(), factor)

    @override
    def is_finite(self, norm: Tensor) -> bool:
        """Collective if the norm is not finite: every rank then."""
        if math.isfinite(float(norm)):
            return True
        mine = torch.tensor([are_finite(self._local(), norm)], device=norm.device).int()
        all_reduce(mine, group=self._group, op="min")
        return bool(mine)


@final
class Zero1(Strategy):
    """One process for each device; each rank updates its part of the parameters."""

    def __init__(self, model: nn.Module, objective: Objective, world: World, wrap: Callable[..., nn.Module]) -> None:
        self._engine = Distributed(model, objective, world, wrap)
        self.group, self.buffers = world.group, self._engine.buffers
        self._device = next(model.parameters()).device
        self._optimizer: ZeroRedundancyOptimizer | None = None

    @override
    def take_over(self, optimizer: Optimizer) -> Optimizer:
        """Collective: every rank."""
        assert self.group is not None
        self._optimizer = divide(optimizer, group=self.group)
        # in shared memory a copy keeps a core busy, so there is nothing that it could run beside
        self._optimizer.overlaps = self._device.type != "cpu" or not scatters(self.group, self._device)
        like = self._optimizer.param_groups[0]["params"][0]
        self.gradients = SliceGradients(self._optimizer.local_gradients, like, self.group)
        return self._optimizer

    @override
    def stamp_buckets(self, stamps: BucketStamps) -> bool:
        return self._engine.stamp_buckets(stamps)

    @override
    def part_is_bad(self) -> bool:
        return self._engine.part_is_bad()

    @override
    def half_done(self) -> HalfDone | None:
        return self._engine.half_done()

    @override
    def whole(self, model: nn.Module) -> nn.Module:
        """Block until its parameters are there."""
        if self._optimizer is not None:
            self._optimizer.wait()
        return model

    @override
    def run(self, micro: MicroBatch, how: Pass) -> None:
        """Collective: every rank, with or without samples."""
        if self._optimizer is not None:
            self._optimizer.wait()
        self._engine.run(micro, how)
