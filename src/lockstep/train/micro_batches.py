"""How a micro-batch of a step is run: with its random numbers, its scale, and its losses on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.data.division import Division
from lockstep.data.feed import Feed
from lockstep.data.loader import MicroBatch
from lockstep.data.same_stream import require_same_stream
from lockstep.train.bad_samples import BadSamples
from lockstep.train.memory import MemoryGuard, advise
from lockstep.train.objective import Part
from lockstep.train.seeds import Seeds
from lockstep.train.stopwatch import Stopwatch
from lockstep.train.strategy import Pass, Strategy
from lockstep.train.tally import Tally
from lockstep.train.update import Updater
from lockstep.train.wishes import Wishes

AfterEach = Callable[[MicroBatch, list[Tensor]], None]
"""Called with a micro-batch of this process and its losses."""


class MicroBatches:
    """Runs micro-batches.

    Args:
        strategy: Who computes.
        updater: Says what losses are scaled by.
        seeds: Sets the random numbers.
        bad_samples: Knows who has no samples.
        division: What of a global batch falls to whom.
        devices: Of this process.
        memory: What takes note if it runs out, or None.
    """

    def __init__(
        self,
        strategy: Strategy,
        updater: Updater,
        seeds: Seeds,
        bad_samples: BadSamples,
        division: Division,
        devices: Sequence[torch.device],
        memory: MemoryGuard | None = None,
    ) -> None:
        self._memory, self._counts = memory, False
        self._strategy, self._updater, self._seeds = strategy, updater, seeds
        self._bad_samples, self._division = bad_samples, division
        self._devices, self._device = devices, devices[0]

    def divide(self, division: Division) -> None:
        """Run other micro-batches from now on, and forget those of this step."""
        self._division = division
        self._bad_samples.begin_again()

    def run_all(
        self,
        feed: Feed,
        watch: Stopwatch,
        wishes: Wishes,
        after_each: Callable[[MicroBatch, list[Tensor]], None],
        *,
        sync: bool,
    ) -> tuple[Tally, int]:
        """Run the micro-batches of a step; return its losses and the size of its global batch, read or not.

        Args:
            feed: Gives them.
            watch: Takes the times.
            wishes: What this rank wants.
            after_each: Told of each.
            sync: Whether gradients are summed over the ranks, and streams compared, in this step.
        """
        group = self._strategy.group if sync else None
        tally = Tally(self._device, None if self._strategy.sums_losses else group, counts=self._counts)
        if self._memory is not None:
            self._memory.begin_step()
        num_samples = 0
        for index in range(self._division.accumulate):
            micro = feed.next()
            self._bad_samples.add(micro)
            num_samples = micro.num_global
            if micro.note is not None:
                require_same_stream(micro.note, micro.step, group=group, device=self._device)
            watch.lap("data_wait_s")
            is_last = index == self._division.accumulate - 1
            if is_last:
                tally.add_bad(self._bad_samples.num_pending)
                tally.add_wishes(stop=wishes.to_stop, failed=wishes.to_fail)
            losses = self.run(micro, index, tally, watch, sync=sync and is_last)
            after_each(micro, losses)
            feed.prefetch()
            watch.lap("data_wait_s")
        self._counts = tally.counts
        watch.begins("communication")
        tally.wait()
        return tally, num_samples

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
            if index == self._division.accumulate - 1 and self._memory is None:
                tally.start_sum()

        if self._memory is None:
            try:
                self._strategy.run(micro, self._prepare(micro, index, watch, after_forward, sync=sync))
            except Exception as error:
                advise(error, self._division.accumulate, self._devices, self._strategy)
                raise
        else:
            self._run_guarded(micro, self._prepare(micro, index, watch, after_forward, sync=sync), self._memory)
            if index == self._division.accumulate - 1:
                if self._memory.error is not None:
                    tally.add_out_of_memory()
                tally.start_sum()
        return losses

    def _run_guarded(self, micro: MicroBatch, how: Pass, memory: MemoryGuard) -> None:
        """Run a micro-batch unless this rank has run out of memory in its step; see [Note: out of memory]."""
        failed = memory.error is not None
        if not failed:
            try:
                self._strategy.run(micro, how)
            except Exception as error:
                if not memory.note(error):
                    raise
                failed = True
        if failed:  # by now nothing refers to what was computed
            memory.take_part(sync=how.sync)

    def replay(self, micro: MicroBatch, index: int) -> list[Tensor]:
        """Compute a micro-batch again, to the same bits; see `lockstep.train.finite.Place`."""
        losses: list[Tensor] = []

        def after_forward(parts: list[Part]) -> None:
            losses.extend(part.value.detach() for part in parts)

        watch = Stopwatch(self._device)
        sync = self._strategy.replay_sums
        self._strategy.run(micro, self._prepare(micro, index, watch, after_forward, sync=sync))
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
