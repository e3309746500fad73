"""One training step, read from top to bottom; `fit` and `compare` both drive it, a step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lockstep import activity
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.comm.world import World
from lockstep.data.batch_iterator import BatchIterator
from lockstep.data.loader import LoadOptions, MicroBatch
from lockstep.data.order import BatchSplit
from lockstep.data.stream import check_same_stream
from lockstep.parallel.consistency import find_difference, replica_of
from lockstep.parallel.reduction_tree import ReductionTree
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train.bad_samples import BadSamples
from lockstep.train.model_state import check_identity, identity_of, load_into, local_state_dict
from lockstep.train.nonfinite import GuardContext, NonFiniteGuard, Replay
from lockstep.train.plan import make_plan
from lockstep.train.reproducible import (
    Arithmetic,
    describe_machine,
    differences,
    first_unlike,
    make_reproducible,
    virtual_shards,
    watch_for_other_kernels,
)
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step import (
    DATA,
    INIT,
    UPDATE,
    Objective,
    ParameterGradients,
    Part,
    Seeds,
    StepMetrics,
    Updater,
    explain_out_of_memory,
    make_updater,
)
from lockstep.train.stopping import ControlFlags
from lockstep.train.strategies import Pass, Strategy, divide, make_strategy
from lockstep.train.task import Task, build_dataset, build_model, build_optimizer
from lockstep.train.timing import StepRecord, Stopwatch, follow_phases

# Replicas that drift apart: every so many steps the ranks compare the bits that all of them should hold.


@dataclass
class ConsistencyCheck:
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


# How a micro-batch of a step is run: with its random numbers, its scale, and its losses on their way.

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
    """

    def __init__(
        self,
        strategy: Strategy,
        updater: Updater,
        seeds: Seeds,
        bad_samples: BadSamples,
        division: BatchSplit,
        devices: Sequence[torch.device],
    ) -> None:
        self._counts = False
        self._strategy, self._updater, self._seeds = strategy, updater, seeds
        self._bad_samples, self._division = bad_samples, division
        self._devices, self._device = devices, devices[0]

    def run_all(
        self,
        feed: BatchIterator,
        watch: Stopwatch,
        wishes: ControlFlags,
        after_each: Callable[[MicroBatch, list[Tensor]], None],
        *,
        sync: bool,
    ) -> tuple[StepMetrics, int]:
        """Run the micro-batches of a step; return its losses and the size of its global batch, read or not.

        Args:
            feed: Gives them.
            watch: Takes the times.
            wishes: What this rank wants.
            after_each: Told of each.
            sync: Whether gradients are summed over the ranks, and streams compared, in this step.
        """
        group = self._strategy.group if sync else None
        tally = StepMetrics(self._device, None if self._strategy.sums_losses else group, counts=self._counts)
        num_samples = 0
        for index in range(self._division.accumulate):
            micro = feed.next()
            self._bad_samples.add(micro)
            num_samples = micro.num_global
            if micro.note is not None:
                check_same_stream(micro.note, micro.step, group=group, device=self._device)
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

    def run(self, micro: MicroBatch, index: int, tally: StepMetrics, watch: Stopwatch, *, sync: bool) -> list[Tensor]:
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

        try:
            self._strategy.run(micro, self._prepare(micro, index, watch, after_forward, sync=sync))
        except Exception as error:
            explain_out_of_memory(error, micro, self._division.accumulate, self._devices)
            raise
        return losses

    def replay(self, micro: MicroBatch, index: int) -> list[Tensor]:
        """Compute a micro-batch again, to the same bits; see `lockstep.train.nonfinite.GuardContext`."""
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


# The step loop as an object: `fit` and `compare` both drive it, a step at a time.


class Trainer:
    """Trains a task a step at a time, for as long as it is asked to.

    Args:
        task: What to train.
        settings: How.
        world: This process among the others, whom strategies with a process for each device use.
        strategy: Who computes.
        devices: This process's devices; the model is on the first.

    Collective for these strategies: every rank makes it, and calls each method that says so.

    Raises:
        ConfigurationError: Task, settings and devices do not go together.
    """

    def __init__(
        self,
        task: Task,
        settings: Settings,
        world: World,
        *,
        strategy: StrategyName,
        devices: Sequence[torch.device],
    ) -> None:
        self.settings, self.devices = settings, list(devices)
        self.device = self.devices[0]
        self.arithmetic = Arithmetic(
            settings.threads or (None if settings.reproducible is None else 1),
            deterministic=settings.reproducible is not None,
        )
        self.caveats: list[str] = []
        self.remarks: list[str] = []
        self.wishes = ControlFlags()
        self.num_steps_done = self._first_step = 0
        self._sync = True
        with self.arithmetic.applied():
            self._build(task, world, strategy)

    def _build(self, task: Task, world: World, strategy: StrategyName) -> None:
        settings = self.settings
        shards = virtual_shards(strategy, world, self.devices, settings)
        division = divide(strategy, world, self.devices, settings) if shards is None else shards.division
        self._seeds = Seeds(settings.seed, self.devices, division.shares)
        self._seeds.all(DATA)
        self.samples = build_dataset(task)
        num_samples = None if isinstance(self.samples, IterableDataset) else len(self.samples)
        self.plan = make_plan(task, settings, division, num_samples=num_samples)
        how = self.load_options(task, settings.workers)
        places = self.devices if shards is None else shards.spread(self.devices)
        self.feed = BatchIterator(self.samples, self.plan.order, division, how, places)
        self._seeds.all(INIT)
        self._model = build_model(task).to("cpu" if strategy == "fsdp" else self.device).train()
        objective = Objective(task, settings.precision)
        if shards is None:
            self._strategy = make_strategy(strategy, self._model, objective, world, self.devices, settings)
        else:
            self._strategy = make_reproducible(
                shards, strategy, self._model, objective, world, self.devices, self.arithmetic
            )
            unlike = first_unlike(self._gather(describe_machine(self.device)))
            self.caveats += [] if unlike is None else [unlike]
        self.optimizer = self._strategy.take_over(build_optimizer(task, self._model))
        gradients = self._strategy.gradients or ParameterGradients(self._model)
        self._updater = make_updater(self._model, self.optimizer, self.plan.learning_rate, settings, gradients)
        self.bad_samples = BadSamples(skip=how.skip_bad, device=self.device, group=self.group, num_samples=num_samples)
        self._micros = MicroBatches(
            self._strategy, self._updater, self._seeds, self.bad_samples, division, self.devices
        )
        rank, later = 0 if self.group is None else self.group.rank(), self._updater.looks_later
        again = Replay(self._micros.replay, self._strategy.can_replay, self._strategy.part_is_bad)
        place = GuardContext(self.plan.order, division, rank, self._gather, later, again)
        self.finite = NonFiniteGuard(settings.on_nan, self._model, self.optimizer, gradients, place)
        self.drift = ConsistencyCheck(
            settings.check_replicas, self.plan.num_steps, self._model, self.optimizer, self._strategy
        )

    def load_options(self, task: Task, workers: int) -> LoadOptions:
        """Return how batches are loaded by so many loader processes."""
        return LoadOptions(
            task.collate,
            workers,
            pin_memory=self.device.type == "cuda",
            ahead=self.settings.prefetch or LoadOptions.ahead,
            skip_bad=self.settings.bad_samples == "skip",
            threads=self.arithmetic.threads if self.arithmetic.deterministic else None,
        )

    @property
    def model(self) -> nn.Module:
        """The bare model, as the last step left it. Collective with fsdp, which makes a whole copy: every rank."""
        return self._strategy.whole(self._model)

    @property
    def group(self) -> Group | None:
        """The ranks that train together, or None if it is only this process."""
        return self._strategy.group

    @property
    def workers(self) -> int:
        """The number of loader processes."""
        return self.feed.workers

    @property
    def tree(self) -> ReductionTree | None:
        """What is summed over the virtual shards is summed in this order; None if there are none."""
        return None if self.settings.reproducible is None else ReductionTree(self.settings.reproducible)

    @property
    def strategy(self) -> Strategy:
        """Who computes."""
        return self._strategy

    @property
    def epoch(self) -> float | None:
        """How many times the data set was passed over, with fractions; None for a stream."""
        steps_per_epoch = self.plan.order.steps_per_epoch
        return None if steps_per_epoch is None else self.num_steps_done / steps_per_epoch

    def step(self) -> StepRecord:
        """Train on the next global batch.

        Collective: every rank of the group. Does not wait for a CUDA device, except in fp16 and with ``reproducible``.
        """
        with self.arithmetic.applied():
            if self.settings.reproducible is None or self.num_steps_done > self._first_step:
                return self._step()
            found: list[str] = []
            with watch_for_other_kernels(found):
                record = self._step()
            self.caveats += [f"{name} has no deterministic kernel on {self.device.type}" for name in found]
            return record

    def _step(self) -> StepRecord:
        activity.now.step = self.num_steps_done
        self.bad_samples.begin_step()
        self.finite.begin_step(self.num_steps_done, self._updater.num_updates)
        watch = Stopwatch(self.device, follow_phases())
        self._updater.begin()
        self.optimizer.zero_grad(set_to_none=True)
        tally, num_samples = self._micros.run_all(self.feed, watch, self.wishes, self.finite.add, sync=self._sync)
        if self._sync:
            self.bad_samples.send(tally.notes, is_sum=not self._strategy.sums_losses)
        watch.lap("communication_s")
        norm, updated = None, False
        if self._sync and not self.bad_samples.all_missing(num_samples):
            self._seeds.all(UPDATE, self.num_steps_done)  # some optimizers draw random numbers
            outcome = self._updater.run(tally.divisor(num_samples, may_miss=self.bad_samples.skip))
            norm, updated = outcome.norm if self._updater.reports_norm else None, outcome.updated
            self._updater.num_updates = self.finite.conclude(outcome, self.num_steps_done, self._updater.num_updates)
        self.finite.end_step()
        watch.lap("optimizer_s")
        record = StepRecord(self.num_steps_done, num_samples, tally.loss(), norm, updated, watch, tally.count)
        self.num_steps_done += 1
        if self._sync:
            self.drift.after_step(self.num_steps_done)
        return record

    def heard(self) -> tuple[bool, bool]:
        """Return whether a rank wanted to stop in the last step, and whether something failed beside the steps of one.

        Collective: every rank of the group. On CUDA, blocks until the forward passes of that step are done.
        """
        if self.group is None:
            return self.wishes.to_stop, self.wishes.to_fail
        self.bad_samples.settle()
        stop, failed = self.bad_samples.heard
        return stop > 0, failed > 0

    def settle(self) -> None:
        """Learn what the last step left for later: bad samples, and whether its gradient was finite.

        Collective: every rank of the group. On CUDA, blocks until backward of that step is done.

        Raises:
            DataError, NonFiniteGradient: The run is to stop at that.
        """
        self.bad_samples.settle()
        self.finite.settle()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Within, steps run forward and backward as ever, but communicate nothing and throw the gradients away.

        What a step takes longer outside is exposed communication. Weights and optimizer are left as they are.
        """
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank holds of what a resumed run needs. Collective: every rank of the group."""
        scaler = self._updater.scaler
        return {
            "run": identity_of(self.plan.order, self.settings, self.arithmetic),
            "machine": describe_machine(self.device),
            "num_steps_done": self.num_steps_done,
            "num_updates": self._updater.num_updates,
            **local_state_dict(self._model, self.optimizer),
            "scaler": scaler.state_dict() if scaler else None,
            "stream": self.feed.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, on any number of devices.

        Raises:
            ConfigurationError: It is of a run on other data, or in another order; or of another model.
        """
        check_identity(identity_of(self.plan.order, self.settings, self.arithmetic), state["run"])
        load_into(self._model, self.optimizer, state)
        if self._updater.scaler is not None and state["scaler"] is not None:
            self._updater.scaler.load_state_dict(state["scaler"])
        self.num_steps_done, self._updater.num_updates = state["num_steps_done"], state["num_updates"]
        self.feed.seek(self.num_steps_done, state.get("stream"))
        self._first_step = self.num_steps_done
        if self.settings.reproducible is not None:
            now = differences(state["machine"], describe_machine(self.device))
            self.caveats += [f"the run was begun elsewhere: {', '.join(now)}"] * bool(now)

    def close(self) -> None:
        """Stop the loader's processes."""
        self.feed.close()

    def _gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, which JSON can hold. Collective if there is a group: every rank."""
        return [value] if self.group is None else all_gather_object(value, group=self.group, device=self.device)
