"""The step loop as an object: `fit` and `compare` both drive it, a step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep import progress
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.comm.world import World
from lockstep.data.auto_workers import search_for
from lockstep.data.division import Division
from lockstep.data.feed import Feed
from lockstep.data.loader import LoadOptions
from lockstep.parallel.tree.shape import Tree
from lockstep.train.arithmetic import Arithmetic, describe_machine, differences, first_unlike, watch_for_other_kernels
from lockstep.train.bad_samples import BadSamples
from lockstep.train.culprit import Again
from lockstep.train.devices import PER_PROCESS
from lockstep.train.drift import DriftCheck
from lockstep.train.engine import make_updater, remarks_of
from lockstep.train.finite import FiniteGuard, Place
from lockstep.train.gradients import ParameterGradients
from lockstep.train.memory import divided_as, guard_memory
from lockstep.train.micro_batches import MicroBatches
from lockstep.train.objective import Objective
from lockstep.train.phase_ranges import follow_phases
from lockstep.train.plan import make_plan
from lockstep.train.reproducible.build import make_reproducible, virtual_shards
from lockstep.train.resume import check_identity, identity_of, load_into
from lockstep.train.seeds import DATA, INIT, UPDATE, Seeds
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step_record import StepRecord
from lockstep.train.stopwatch import Stopwatch
from lockstep.train.strategies import divide, make_strategy
from lockstep.train.strategy import Strategy
from lockstep.train.tally import Tally
from lockstep.train.task import Task, build_dataset, build_model, build_optimizer
from lockstep.train.whole_state import take_whole
from lockstep.train.wishes import Wishes


class Loop:
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
        self.wishes = Wishes()
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
        how = self.load_options(task, 0 if settings.workers == "auto" else settings.workers)
        places = self.devices if shards is None else shards.spread(self.devices)
        search = search_for(settings.workers, world.local_world_size if strategy in PER_PROCESS else 1)
        self.feed = Feed(self.samples, self.plan.order, division, how, places, search=search, agree=self._gather)
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
        self._memory = guard_memory(settings, self._strategy, self._model, self.samples, self.devices, self._gather)
        self._micros = MicroBatches(
            self._strategy, self._updater, self._seeds, self.bad_samples, division, self.devices, self._memory
        )
        rank, later = 0 if self.group is None else self.group.rank(), self._updater.looks_later
        again = Again(self._micros.replay, self._strategy.replay_sums, self._strategy.part_is_bad)
        place = Place(self.plan.order, division, rank, self._gather, later, again)
        self.finite = FiniteGuard(settings.on_nan, self._model, self.optimizer, gradients, place)
        self.drift = DriftCheck(
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
    def tree(self) -> Tree | None:
        """What is summed over the virtual shards is summed in this order; None if there are none."""
        return None if self.settings.reproducible is None else Tree(self.settings.reproducible)

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
        progress.now.step = self.num_steps_done
        self.bad_samples.begin_step()
        self.finite.begin_step(self.num_steps_done, self._updater.num_updates)
        self.feed.begin_step()
        watch = Stopwatch(self.device, follow_phases())
        self._updater.begin()
        tally, num_samples = self._compute(watch)
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
        self.remarks += self.feed.end_step() + remarks_of(self._strategy.gradients)
        return record

    def _compute(self, watch: Stopwatch) -> tuple[Tally, int]:
        """Run the micro-batches of the step, and again in smaller ones if a rank has not the memory for them."""
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            tally, num_samples = self._micros.run_all(self.feed, watch, self.wishes, self.finite.add, sync=self._sync)
            if self._memory is None or not tally.num_out_of_memory:
                return tally, num_samples
            self._divide(self._memory.shrink(self.plan, self.num_steps_done, self.remarks))

    def _divide(self, division: Division) -> None:
        """Cut this step's global batch, and those that follow, into other micro-batches."""
        self.plan = replace(self.plan, division=division)
        self._micros.divide(division)
        self.finite.begin_again(division)
        self.feed.divide(division, self.num_steps_done)

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

    def state_dict(self, *, everywhere: bool = False) -> dict[str, Any]:
        """Return all that a resumed run needs, on rank 0 or ``everywhere``. Collective: every rank of the group."""
        scaler = self._updater.scaler
        return {
            "run": identity_of(self.plan.order, self.settings, self.arithmetic),
            "machine": describe_machine(self.device),
            "num_steps_done": self.num_steps_done,
            "num_updates": self._updater.num_updates,
            "accumulate": self.plan.division.accumulate,
            **take_whole(self._model, self.optimizer, everywhere=everywhere),
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
        if self._memory is not None:
            self._divide(divided_as(self.plan, state["accumulate"]))
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
