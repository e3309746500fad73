"""Replicas that drift apart: every so many steps the ranks compare the bits that all of them should hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lockstep.parallel.replica import replica_of
from lockstep.parallel.replica_check import find_difference
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train.strategy import Strategy


@dataclass
class DriftCheck:
    """Compares what the ranks hold.

    Args:
        every: Steps between two checks; 0 for never.
        last: Steps of the run; after the last of them there is a check, too.
        model: The bare model.
        optimizer: Of its parameters.
        strategy: Who computes.
    """

    every: int
    last: int
    model: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    _alike_after: int | None = None

    def after_step(self, num_steps: int) -> None:
        """Compare if it is time to, after so many steps; see `run`. It is after the first, too, for the record."""
        if self.every and (num_steps % self.every == 0 or num_steps == self.last or self._alike_after is None):
            self.run(num_steps)

    def before_keeping(self, num_steps: int) -> None:
        """Compare what is about to be written to disk, unless it was compared already; see `run`."""
        if self.every:
            self.run(num_steps)

    def run(self, num_steps: int) -> None:
        """Compare what the ranks hold after so many steps; nothing if there are no others.

        Collective: every rank. Blocks.

        Raises:
            ReplicasDiffer: On every rank; names the tensor, the ranks on each side, and since when.
        """
        group = self.strategy.group
        if group is None or group.size() == 1 or self._alike_after == num_steps:
            return
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.wait()
        replica = replica_of(self.model, self.optimizer, buffers=self.strategy.buffers)
        difference = find_difference(replica, group=group, device=next(self.model.parameters()).device)
        if difference is not None:
            known = self._alike_after is not None
            since = f"After step {self._alike_after} all were alike." if known else "There was no check before."
            raise difference.error(now=f" (after step {num_steps})", since=since)
        self._alike_after = num_steps
