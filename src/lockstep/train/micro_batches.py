"""How a micro-batch of a step is run: with its random numbers, its scale, and its losses on their way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lockstep.data.division import Division
from lockstep.data.loader import MicroBatch
from lockstep.train.bad_samples import BadSamples
from lockstep.train.objective import Part
from lockstep.train.seeds import Seeds
from lockstep.train.stopwatch import Stopwatch
from lockstep.train.strategy import Pass, Strategy
from lockstep.train.tally import Tally
from lockstep.train.update import Updater


class MicroBatches:
    """Runs micro-batches.

    Args:
        strategy: Who computes.
        updater: Says what losses are scaled by.
        seeds: Sets the random numbers.
        bad_samples: Knows who has no samples.
        division: What of a global batch falls to whom.
        device: The first of this process.
    """

    def __init__(
        self,
        strategy: Strategy,
        updater: Updater,
        seeds: Seeds,
        bad_samples: BadSamples,
        division: Division,
        device: torch.device,
    ) -> None:
        self._strategy, self._updater, self._seeds = strategy, updater, seeds
        self._bad_samples, self._division, self._device = bad_samples, division, device

    def run(self, micro: MicroBatch, index: int, tally: Tally, watch: Stopwatch, *, sync: bool) -> list[Tensor]:
        """Run forward and backward; return the losses of this process's shares.

        The sum of the losses is under way before the last backward, where it can be. Collective: every rank.

        Args:
            micro: The samples.
            index: The number of the micro-batch in its step.
            tally: Takes the losses.
            watch: Takes the times.
            sync: Whether gradients are summed over the ranks at the end of backward.
        """
        losses: list[Tensor] = []

        def after_forward(parts: list[Part]) -> None:
            losses.extend(part.value.detach() for part in parts)
            tally.add(parts)
            if self._updater.in_backward:
                tally.require_means()
            if index == self._division.accumulate - 1:
                tally.start_sum()

        self._strategy.run(micro, self._prepare(micro, index, watch, after_forward, sync=sync))
        return losses

    def replay(self, micro: MicroBatch, index: int) -> list[Tensor]:
        """Compute a micro-batch again, to the same bits, on this rank alone; see `lockstep.train.finite.Place`."""
        losses: list[Tensor] = []

        def after_forward(parts: list[Part]) -> None:
            losses.extend(part.value.detach() for part in parts)

        watch = Stopwatch(self._device)
        self._strategy.run(micro, self._prepare(micro, index, watch, after_forward, sync=False))
        return losses

    def _prepare(
        self,
        micro: MicroBatch,
        index: int,
        watch: Stopwatch,
        after_forward: Callable[[list[Part]], None],
        *,
        sync: bool,
    ) -> Pass:
        """Return how a micro-batch is run, and set its random numbers."""
        self._seeds.forward(micro, index)
        scale = self._updater.loss_scale / micro.num_global
        seed = partial(self._seeds.share, micro.step, 0)
        all_have = partial(self._bad_samples.all_have_samples, micro, index, self._division)
        return Pass(scale, sync, watch, after_forward, seed, all_have)
