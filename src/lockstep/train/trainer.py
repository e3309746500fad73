"""One training step, read from top to bottom; `fit` and `compare` both drive it, a step at a time."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lockstep.base import activity
from lockstep.base.accelerator import HostCopy, synchronize, widest_dtype
from lockstep.checkpoints import model_state
from lockstep.comm.collectives import Group, all_gather_object, all_reduce
from lockstep.comm.world import World
from lockstep.data.loader import BatchIterator, LoadOptions, MicroBatch, load_order
from lockstep.data.order import Purpose, ShardOrder
from lockstep.data.shards import HasShardOrder
from lockstep.data.stream import StreamOrder
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.parallel.compile import compile_in_place
from lockstep.parallel.consistency import refuse_difference
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.telemetry.recorder import StepTimer
from lockstep.telemetry.step_times import StepTimes
from lockstep.train import optimizers, step_parts
from lockstep.train.plan import VirtualShards, make_plan
from lockstep.train.reports import Reports
from lockstep.train.settings import Settings, StrategyName, check_engine
from lockstep.train.skipping import BadSamples, Computed
from lockstep.train.strategies import reproducible
from lockstep.train.strategies import strategy as strategies
from lockstep.train.strategies.choice import make_strategy, share_batch_norms
from lockstep.train.task import (
    Task,
    build_dataset,
    build_model,
    build_optimizer,
    check_registered,
    required_by,
    warn_early,
)
from lockstep.train.update import Update, Updater


@dataclass(frozen=True)
class StepRecord:
    """The result of a step. Only reading a number waits for the device.

    Args:
        step: Counted from 0 over all epochs.
        num_samples: Number of samples of the global batch.
        loss: Mean over the global batch, a 0-dimensional tensor.
        grad_norm: Global norm of the gradient before clipping, if it was needed.
        updated: Whether the optimizer made a step; False after an overflow in fp16, and without synchronisation.
        count: Number of items, such as tokens, that the loss is a mean over, a 0-dimensional tensor; None: samples.
        checks: Whether `check_replicas` is due after it, as set; the same on every rank. Done already with
            `Trainer.checks_in_step`.
        timer: The time by phase.
    """

    step: int
    num_samples: int
    loss: Tensor
    grad_norm: Tensor | None
    updated: bool
    count: Tensor | None
    checks: bool
    timer: StepTimer = field(repr=False)

    @property
    def times(self) -> StepTimes:
        """The times of the step on this rank. Blocks on a device until its last phase is over."""
        if isinstance(self.timer.marks.end, torch.Event):
            synchronize(self.timer.marks.end)
        return self.timer.marks.times()


class Trainer:
    """Trains a task, one step per call.

    Collective for strategies with a process for each device: every rank creates it, and calls each collective method.

    Args:
        task: The task.
        settings: How to train it.
        world: The ranks, for strategies with a process for each device.
        strategy: Name of the strategy.
        devices: This process's devices; the model is on the first.

    Attributes:
        plan: Steps, samples and learning rate.
        strategy, optimizer, updater, samples, loading, batches: As created.
        group: The ranks that train together; None: only this process.
        bad_samples: Samples that were skipped so far.
        num_steps_done: Number of steps done, including those before a resume.
        reports: What this rank sends to the others with each step, and gets from them.
        caveats: Reasons why the bits may differ from those of another run, to be shown to the user.
        changes: What the plan of a resumed run has changed, such as ``steps from 100 to 200``.

    Raises:
        ConfigurationError: Task, settings and devices cannot be combined.
    """

    def __init__(
        self, task: Task, settings: Settings, world: World, *, strategy: StrategyName, devices: Sequence[torch.device]
    ) -> None:
        self.settings, self.devices, self.device = settings, list(devices), devices[0]
        is_exact = settings.reproducible is not None
        self.arithmetic = reproducible.Arithmetic(settings.threads or (1 if is_exact else None), is_exact)
        late = reproducible.find_late_cublas(self.device) if is_exact else None
        self.caveats = [] if late is None else [late]
        self.changes: list[str] = []
        self.num_steps_done = 0
        self._sync, self._has_counts = True, False
        # Read in the next step: the report of the last step; its micro-batches, None without an update; its number.
        self._unsettled: tuple[HostCopy, Computed | None, int] | None = None
        # Called after the last collective of a step and before its update; see loop/recovery.py.
        self.before_update: Callable[[], object] | None = None
        self.checks_in_step = True  # else a rank may be lost in `check_replicas`, when the step is complete
        self._task, self._name = task, strategy
        with self.arithmetic.applied():
            shards = self._divide(world)
            self._build(task, shards)
            self._connect(world, shards, is_first=True)

    def _divide(self, world: World) -> VirtualShards | None:
        """Divide the global batch among the ranks of ``world``."""
        settings = self.settings
        check_engine(self._name, settings)
        shards = reproducible.virtual_shards(self._name, world, self.devices, settings)
        split = strategies.split_batch(self._name, world, self.devices, settings) if shards is None else shards.split
        self._seeds = step_parts.Seeds(settings.seed, self.devices, split.shares)
        self._split = split
        return shards

    def _build(self, task: Task, shards: VirtualShards | None) -> None:
        """Build data and model."""
        settings = self.settings
        self._seeds.all(Purpose.DATA)
        self.samples = build_dataset(task)
        num_samples = None if isinstance(self.samples, IterableDataset) else len(self.samples)
        ordered = self.samples if isinstance(self.samples, HasShardOrder) else None
        self.plan = make_plan(task, settings, self._split, num_samples=num_samples, shards=ordered)
        self._split = self.plan.split
        # The bits of a transform's result may depend on the number of threads.
        threads = self.arithmetic.threads if self.arithmetic.deterministic else None
        pins, ahead = self.device.type != "cpu", settings.prefetch or 2
        skip = settings.bad_samples == "skip"
        self.loading = LoadOptions(task.collate, settings.workers, pins, ahead, skip, threads)
        self._open_batches(shards)

        # Seeded again, because the data set may have drawn random numbers: all ranks must get the same weights. Under
        # fsdp the whole model need not fit on a device; on the meta device it needs no memory at all.
        self._seeds.all(Purpose.INIT)
        is_divided = self._name == "fsdp"
        self._model = build_model(task, "cpu" if is_divided else self.device, keeps_meta=is_divided)
        if settings.compile and not is_divided:
            compile_in_place(self._model, self._name, settings.bucket_cap_mb, is_exact=self.arithmetic.deterministic)
        self._began_trained = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        self._hooks = step_parts.seed_recurrent_on_host(self._model, self.device)

    def _open_batches(self, shards: VirtualShards | None) -> None:
        places = self.devices if shards is None else [self.device] * len(shards.mine)
        devices = dict(zip(self._split.shares, places, strict=False))  # torch's DataParallel has one share only
        order = self.plan.order
        load = order.load if isinstance(order, StreamOrder) else partial(load_order, order)
        self.batches = BatchIterator(partial(load, self.samples, self._split, self.loading), devices)

    def _connect(self, world: World, shards: VirtualShards | None, *, is_first: bool) -> None:
        """Create everything that holds process groups. Collective: every rank of the group."""
        task, settings = self._task, self.settings
        # Made as on a new rank, which gets to know later what callbacks have frozen or unfrozen.
        now = {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
        self._switch({name: name in self._began_trained for name in now})
        objective = step_parts.Objective(task, settings.precision)
        self.strategy: strategies.Strategy
        if shards is None:
            line = share_batch_norms(self._name, self._model, settings, world, self.devices)
            self.strategy = make_strategy(
                self._name, self._model, objective, settings, world, self.devices, self.plan, is_first=is_first
            )
            self.strategy.batch_norms = line
        else:
            group = world.group if self._name == "ddp" else None
            self.strategy = reproducible.Reproducible(
                self._model, objective, shards, self.devices, group, is_first=is_first
            )
        self._switch(now)
        self.group: Group | None = self.strategy.group
        if shards is not None and self.group is not None:
            # Other hardware may round differently. That is not an error, but the same bits are not guaranteed.
            machine_here = reproducible.describe_machine(self.device)
            machines = all_gather_object(machine_here, group=self.group, device=self.device)
            for rank, machine in enumerate(machines):
                if machine != machines[0]:
                    self.caveats.append(f"rank {rank} has another machine than rank 0: {machine}, not {machines[0]}")
                    break

        if is_first:
            self._make_updater(task, world)
            self.alike_after: int | None = None
            skip, num_samples = self.loading.skip_bad, self.plan.order.num_samples
            self.bad_samples = BadSamples(skip=skip, device=self.device, group=self.group, num_samples=num_samples)
            if (averaging := self.strategy.averaging) is not None:
                averaging.flags, averaging.on_flags = [0.0] * step_parts.NUM_FLAGS, self._take_flags
            self.reports = Reports(self.group, self.device)
        else:
            self.strategy.take_over(self.optimizer)
            self.updater.connect(self.strategy, self.plan)
        self._loss_group = None if self.strategy.sums_losses else self.strategy.step_group
        self._sum_dtype = widest_dtype(self.device)
        self.bad_samples.group = self.reports.group = self.group

    def _make_updater(self, task: Task, world: World) -> None:
        """Build the optimizer, and what uses it."""
        optimizer = build_optimizer(task, self._model)
        check_registered(optimizer, self._model, is_alone=self.group is None or world.world_size == 1)
        self._frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        optimizers.check_optimizer(optimizer, self._name, self.settings, has_average=task.ema is not None)
        average = None if task.ema is None else step_parts.AveragedWeights(self._model, task.ema)
        if optimizers.has_modes(optimizer):
            optimizer.train()  # type: ignore[attr-defined]
            average = step_parts.AveragedWeights(self._model, 0.0, lambda: optimizers.evaluating(self.optimizer))
        if self.group is None or world.is_rank_zero:
            warn_early(self._model)
        needs_closure = "closure" in required_by(optimizer.step)
        self.optimizer: Optimizer = self.strategy.take_over(optimizer)
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.has_state = not world.is_late
        self.updater = Updater(
            self._name,
            self.settings,
            self.plan,
            self._model,
            self.optimizer,
            self.strategy,
            average,
            needs_closure=needs_closure,
            evaluates=task.eval_dataset is not None,
            replay=self._replay,
        )

    def _switch(self, trained: Mapping[str, bool]) -> None:
        """Set by name whether parameters are trained."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad != trained.get(name, parameter.requires_grad):
                parameter.requires_grad_(trained[name])

    # --- recovery in place: `lockstep.loop.recovery.Connected` -------------------------------------------------------

    @property
    def can_reconnect(self) -> bool:
        """Whether the others can go on when a rank is lost: they hold the whole state, and change it at the end."""
        has_all = self._name == "ddp" or (self._name == "ddp-zero1" and self.settings.redundancy > 0)
        averaging = self.strategy.averaging
        if averaging is not None:  # a step communicates if it compares streams, or if a replica is a machine
            has_all = self.plan.order.num_samples is not None and self.strategy.step_group is None
            return has_all and averaging.can_reconnect
        return has_all and self.group is not None and not self.settings.overlap_optimizer

    def keep(self) -> None:
        """Keep what changes in a step before the update, apart from buffers and what `restore` knows."""
        if self.strategy.ours is not None:
            self.strategy.ours.keep()

    def restore(self) -> None:
        """Return to the begin of the step that a lost rank has interrupted."""
        if self.strategy.averaging is not None:
            return  # it is complete: only its exchange is done again
        self.updater.restore()
        self.batches.rewind(self.num_steps_done)
        self.bad_samples.pending.clear()
        self._unsettled = None

    def reconnect(self, world: World) -> None:
        """Use the groups of ``world`` from now on, and its division of the batch. Collective: every rank."""
        old = self.strategy.ours
        if old is not None:  # not with virtual shards
            old.reducer.remove_hooks()
        with self.arithmetic.applied():
            before, shards = self._split, self._divide(world)
            self._split = replace(self._split, num_lanes=before.num_lanes)
            if self._split != before:
                self.plan = self.updater.nonfinite.plan = replace(self.plan, split=self._split)
                state, copies = self.batches.state(), self.batches.copies
                self._open_batches(shards)
                self.batches.copies = copies
                self.batches.seek(self.num_steps_done, state)
            if isinstance(self.strategy, strategies.LocalSteps):
                self.strategy.reconnect(world)
                self.group = self.bad_samples.group = self.reports.group = self.strategy.group
                return
            self._connect(world, shards, is_first=False)
        if old is not None and (new := self.strategy.ours) is not None:
            new.reducer.observers += [stamps for stamps in old.reducer.observers if isinstance(stamps, BucketStamps)]
            if old.kept is not None:
                new.load_compression_state_dict(old.kept)
                new.kept = old.kept

    def modules_to_restore(self) -> list[nn.Module]:
        """Return the modules whose buffers change in a step."""
        return [self._model] if self.strategy.averaging is None else []

    def agreed_plan(self) -> Any:
        """Return the order of the buckets, and what else the ranks know together and a checkpoint has not."""
        ours, modes = self.strategy.ours, [module.training for module in self._model.modules()]
        return [None if ours is None else ours.agreed_plan(), self.alike_after, self._has_counts, modes]

    def use_plan(self, plan: Any) -> None:
        """Use the order of the buckets of another rank. Collective: every rank."""
        buckets, self.alike_after, self._has_counts, modes = plan
        for module, mode in zip(self._model.modules(), modes, strict=False):
            module.training = mode
        if self.strategy.ours is not None:
            self.strategy.ours.use_plan(buckets)
            if isinstance(self.optimizer, ZeroRedundancyOptimizer):
                self.optimizer.reconnect(self.strategy.ours.process_group, self.strategy.ours.reducer)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Train on the next global batch.

        Collective: every rank of the group. Waits for the backward of the step before when the first forward is queued;
        for its own in fp16 and with ``on_nan="skip"``, if the optimizer is not fused; with ``reproducible``; and in
        exchanges of ``local-sgd`` and ``diloco``.
        """
        self._refuse_unfrozen()
        step = self.num_steps_done
        activity.now.step_counter[0] = step + 1
        timer = StepTimer(self.device, step)
        self.batches.can_rewind = self.before_update is not None
        is_exact = self.arithmetic.threads or self.arithmetic.deterministic
        with self.arithmetic.applied() if is_exact else contextlib.nullcontext():
            self.updater.begin()
            # Replicas that train independently only communicate when they exchange parameters.
            averaging = self.strategy.averaging
            group = self.group if self._sync and (averaging is None or self.strategy.agrees(step)) else None
            computed, metrics = self._accumulate(timer, group)

            timer.begin("communication")
            num_samples, replicas = computed[-1][0].num_global, self.strategy.num_replicas
            metrics.wait(num_samples / replicas, may_miss=self.bad_samples.skip or replicas > 1 or not self._sync)
            if group is not None and averaging is None:
                if self._loss_group is not group:
                    all_reduce(metrics.flags, group=group)
                if self.device.type == "cpu":  # on a device they are read with the norm
                    self._take_flags(metrics.flags.tolist(), step)

            if self.before_update is not None:
                self.before_update()
            timer.begin("optimizer")
            norm, updated = None, False
            if self._sync and not (self.bad_samples.skip and self._is_missing(computed, metrics)):
                norm, updated = self._update(metrics, computed, step)
            elif self._sync:
                self._unsettled = HostCopy(metrics.report), None, step
            if self.settings.clip is None and self.updater.scaler is None:
                norm = None
            self.updater.end()
            self.num_steps_done += 1
            if self._sync and averaging is not None:
                timer.begin("communication")
                self.strategy.end_step(step, metrics.flags)  # in which a rank that is lost may be replaced
            timer.begin("")
            checks = group is not None and self.is_check_due
            if checks and self.checks_in_step:
                self.check_replicas()
        return StepRecord(step, num_samples, metrics.loss, norm, updated, metrics.count, checks, timer)

    def _refuse_unfrozen(self) -> None:
        unfrozen = {id(parameter): name for name, parameter in self._frozen.items() if parameter.requires_grad}
        held = [id(each) for group in self.optimizer.param_groups for each in group["params"]] if unfrozen else ()
        if missing := [name for key, name in unfrozen.items() if key not in held]:
            raise ConfigurationError(
                f"{missing[0]} was unfrozen, but the optimizer does not have it: Task.optimizer got the "
                "parameters that were trainable at the start.\nLet it take the model, and give the optimizer frozen "
                "parameters as well: optimizer=lambda model: AdamW(model.parameters())."
            )

    def _accumulate(self, timer: StepTimer, group: Group | None) -> tuple[Computed, step_parts.StepMetrics]:
        """Fetch, forward and backward of each micro-batch; return them with their losses, whose sum has been started.

        Gradient accumulation: gradients add up over the micro-batches, and are reduced during the last backward of the
        step. The losses are summed over the ranks at the same time: the sum starts as soon as they are all known.
        """
        loss_group = self._loss_group if self._sync else None
        in_backward = self.updater.policy is Update.IN_BACKWARD
        metrics = step_parts.StepMetrics(self.device, loss_group, self._sum_dtype, self._has_counts, in_backward)
        self.bad_samples.num_in_step = 0
        computed: Computed = []
        num_micro = self.plan.split.accumulate

        for index in range(num_micro):
            # A rank that cannot read a sample still takes part in the step, otherwise the others would wait.
            micro = self.batches.next()
            if micro.bad:
                self.bad_samples.add(micro)
            if micro.note is not None:
                self.reports.read = micro.note.checksum, micro.step
            is_last = index == num_micro - 1
            losses: list[Tensor] = []
            on_losses = partial(self._add_losses, metrics, losses, is_last=is_last, compares=group is not None)
            try:
                self._compute(micro, index, timer, on_losses, sync=self._sync and is_last)
            except Exception as error:
                step_parts.explain_one_sample(error, micro)
                step_parts.explain_out_of_memory(error, micro, num_micro)
                if self.arithmetic.deterministic:
                    reproducible.explain_unordered(error)
                raise
            computed.append((micro, losses))
            timer.begin("data_wait")
            if self.device.type != "cpu":
                self.batches.prefetch()
        self._has_counts = metrics.has_counts
        self.settle()  # DataParallel of a process without samples runs no forward
        return computed, metrics

    def _add_losses(
        self,
        metrics: step_parts.StepMetrics,
        losses: list[Tensor],
        parts: list[step_parts.Part],
        *,
        is_last: bool,
        compares: bool,
    ) -> None:
        """Take the losses of a micro-batch between its forward and its backward; with the last, start their sum.

        Args:
            metrics: Of the step, whose sum over the ranks also carries what they have to agree on: bad samples, stops,
                failures, requests of callbacks, and a number of what was read.
            losses: Gets the losses.
            parts: The losses of the parts of the micro-batch, with their weights.
            is_last: Whether this is the last micro-batch of the step.
            compares: Whether ranks compare what they have read.
        """
        self.settle()  # what the last step has left for later
        if self.updater.policy is Update.IN_BACKWARD:  # parameters are updated as soon as their bucket is reduced
            self.updater.update_average(is_used=False)
            self.updater.advance()
        flags = self.reports.flags(len(self.bad_samples.pending), compares=compares) if is_last else None
        losses += metrics.add(parts, flags)

    def _compute(
        self, micro: MicroBatch, index: int, timer: StepTimer, on_losses: strategies.OnLosses, *, sync: bool
    ) -> None:
        """Run forward and backward of a micro-batch with its random numbers, and gradients summed if ``sync``."""
        self._seeds.forward(micro, index)
        seed = partial(self._seeds.all, Purpose.FORWARD, micro.step, 0)
        all_have_samples = partial(self.bad_samples.all_have_samples, micro, index, self.plan.split)
        context = strategies.Pass(
            1.0 / micro.num_global, sync, timer, on_losses, seed, all_have_samples, self.updater.scaler
        )
        self.strategy.run(micro, context)

    def _replay(self, micro: MicroBatch, index: int) -> list[Tensor]:
        """Compute a micro-batch again, to the same bits, and return its losses."""
        parts: list[step_parts.Part] = []
        self._compute(micro, index, StepTimer(self.device), parts.extend, sync=False)
        return [part.value.detach() for part in parts]

    def _is_missing(self, computed: Computed, metrics: step_parts.StepMetrics) -> bool:
        """Return whether no rank could read any sample of the step. Blocks until forward is done if this one could not.

        The same on every rank.
        """
        if any(micro.batches for micro, _ in computed):
            return False
        num_bad = HostCopy(metrics.flags).read()[0] if self._has_flags_later else self.bad_samples.num_in_step
        return bool(num_bad >= computed[-1][0].num_global)

    # --- the update of a step -----------------------------------------------------------------------------------------

    def _update(self, metrics: step_parts.StepMetrics, computed: Computed, step: int) -> tuple[Tensor, bool]:
        """Divide and clip the gradient, by its global norm and in one pass over it, and update the parameters.

        Return the norm before clipping, and whether they were updated.

        A sum with NaN or infinity is not finite, and all ranks hold the same bits of the reduced gradient, so all get
        the same result without communication. (If the gradient is sharded, the norm is summed over the ranks.)

        Args:
            metrics: The sums of the step, with the remaining divisor of the gradient.
            computed: The micro-batches of this process.
            step: Counted from 0.
        """
        updater = self.updater
        # Of the last step: now its parameters have been gathered, and its gradient was checked.
        updater.update_average(is_used=False)
        self._seeds.all(Purpose.UPDATE, step)  # some optimizers draw random numbers
        in_backward = updater.policy is Update.IN_BACKWARD
        norm, report = updater.scale_gradient(metrics)
        if not in_backward:
            updater.advance()
        waits = updater.waits
        kept = computed if waits else [(micro._replace(batches=[]), losses) for micro, losses in computed]
        self._unsettled = report, kept, step
        if waits and not self.settle(is_over=in_backward):
            return norm, in_backward
        updater.update(norm, metrics.loss, partial(self._compute_again, computed, step))
        return norm, True

    def _compute_again(self, computed: Computed, step: int) -> Tensor:
        """Compute the gradient of a step for the parameters as they are now; return the loss. Collective."""
        self.optimizer.zero_grad(set_to_none=True)
        metrics = step_parts.StepMetrics(self.device, self._loss_group, self._sum_dtype, self._has_counts, False)
        for index, (micro, _) in enumerate(computed):
            is_last = index == len(computed) - 1
            on_losses = partial(metrics.add, flags=[0] * step_parts.NUM_FLAGS if is_last else None)
            self._compute(micro, index, StepTimer(self.device), on_losses, sync=is_last)
        metrics.wait(computed[-1][0].num_global, may_miss=self.bad_samples.skip)
        self.updater.scale_gradient(metrics)
        self._seeds.all(Purpose.UPDATE, step)  # as before: the draws of a forward differ between ranks
        return metrics.loss

    def note_evaluation(self, loss: float) -> None:
        """Pass the loss of an evaluation after the last step to the scheduler."""
        self.updater.scheduler.add_loss(self.num_steps_done, loss)

    @property
    def _has_flags_later(self) -> bool:
        """Whether the flags of the ranks come with the report of a step: on a device. On CPUs they come before it."""
        return self.device.type != "cpu" and self.group is not None and self.strategy.averaging is None

    def settle(self, *, is_over: bool = True) -> bool:
        """Do the checks that the last step left for later: whether its gradient was finite, and bad samples.

        Collective: every rank of the group. Blocks until backward of that step is done.

        Args:
            is_over: See `NonFiniteGuard.refuse`.

        Returns:
            Whether the gradient was finite, or had been checked before.

        Raises:
            DataError, NonFiniteGradient: A check failed, and the run is to stop.
        """
        if self._unsettled is None:
            return True
        (report, computed, step), self._unsettled = self._unsettled, None
        *flags, norm = report.read().tolist()  # the only wait of a step
        is_finite = computed is None or self.updater.conclude(norm, computed, step, is_over=is_over)
        if self._has_flags_later:
            self._take_flags(flags, step)
        return is_finite

    def _take_flags(self, sums: list[float], step: float = math.inf) -> None:
        """Note what the ranks have reported up to ``step``. Collective if samples could not be read: every rank."""
        if self.reports.take(sums):  # the same on every rank, so all take part
            self.bad_samples.exchange(step)

    @property
    def reports_in(self) -> int:
        """Number of steps after which all ranks, and devices of any kind, know `reports`. `settle` makes them known."""
        return int(not self._has_flags_later and self.strategy.averaging is None)

    # --- check that replicas are equal --------------------------------------------------------------------------------

    @property
    def is_check_due(self) -> bool:
        """Whether `check_replicas` is due after the last step, if the ranks have communicated in it."""
        every, done, since = self.settings.check_replicas, self.num_steps_done, self.alike_after
        # Also after the first step, so that an error can name the last step after which the replicas were equal.
        is_due = since is None or (every and done // every > since // every) or done == self.plan.num_steps
        return bool(every) and bool(is_due)

    def check_replicas(self) -> None:
        """Check that all ranks hold the same bits, unless this was done after this step already.

        Collective: every rank. Blocks.

        Raises:
            ReplicasDiffer: On every rank; names the tensor, the ranks on each side, and the last successful check.
        """
        group, done = self.group, self.num_steps_done
        if not self.settings.check_replicas or group is None or group.size() == 1 or self.alike_after == done:
            return
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.wait()
        replica = self.strategy.replica(self._model, self.optimizer)
        was_checked = self.alike_after is not None
        since = f"After step {self.alike_after} all were alike." if was_checked else "There was no check before."
        device = next(self._model.parameters()).device
        refuse_difference(replica, group=group, device=device, now=f" (after step {done})", since=since)
        self.alike_after = done

    # --- around the steps ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model without wrappers, after the last step. Collective with fsdp, which returns a whole copy."""
        return self.strategy.whole(self._model)

    @property
    def module(self) -> nn.Module:
        """The model that is being trained, without wrappers; with fsdp, with the shards of this rank."""
        return self._model

    def final_model(self) -> nn.Module:
        """Return the model at the end, with the averaged weights; with fsdp, with the shards of this rank."""
        self.settle()
        average = self.updater.average
        if average is not None and not average.is_swapped:
            self.updater.update_average()
            average.swap()
        return self.strategy.weights(self._model)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block, the model has the averaged weights, if there are any. Blocks until they are complete."""
        self.settle()
        self.updater.update_average()
        average = self.updater.average
        with contextlib.nullcontext() if average is None else average.applied():
            yield

    def load_weights(self, state: dict[str, Any]) -> None:
        """Load the weights of a checkpoint, the averaged ones if it has them, into the model."""
        weights = {**state["model"], **state.get("ema", {})}
        model_state.load_state_dict(self.strategy.weights(self._model), None, {"model": weights})

    def export(self, path: Path, *, writes: bool) -> None:
        """Write the weights to a file; see `model_state.export_weights`. Collective: every rank of the group."""
        model_state.export_weights(self.strategy.weights(self._model), path, writes=writes)

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Within the block, steps run forward and backward without communication, and discard the gradients.

        The additional time of a normal step is exposed communication. Weights and optimizer are not changed.
        """
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def _identity(self) -> dict[str, Any]:
        """Return the values that must not change when a run is resumed."""
        order, settings = self.plan.order, self.settings
        identity = {"samples": order.num_samples, "global batch": order.batch_size, "seed": order.seed}
        if isinstance(order, ShardOrder):
            identity |= {"shards": len(order.sizes), "window": order.window, "lanes": order.num_lanes}
        if settings.reproducible is not None:
            identity |= {"reproducible": settings.reproducible, "threads": self.arithmetic.threads}
        return identity

    def _planned(self) -> dict[str, Any]:
        """Return the values that may change when a run is resumed, by name; a line says which have."""
        rate, base = self.plan.learning_rate, self.updater.base_rates
        return {
            **self._task.parameters,
            "steps": self.plan.num_steps,
            "schedule": rate.decay if isinstance(rate.decay, str) else "of the task",
            "warmup": rate.warmup,
            "learning rate": ", ".join(f"{base_rate * rate.scale:.6g}" for base_rate in dict.fromkeys(base)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state of the run. Collective: every rank of the group."""
        return self._state(self.optimizer) | self.strategy.state_dict(self.optimizer)

    def replica_state(self) -> dict[str, Any]:
        """Return what is the same on every rank: the whole state, or all but that of a sharded optimizer."""
        optimizer = None if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer
        state = self._state(optimizer) | self.strategy.replica_state(self.optimizer)
        if "compression" in state:  # residuals are this rank's
            state["compression"] = {"bases": state["compression"]["bases"]}
        return state

    def load_replica_state(self, state: dict[str, Any]) -> None:
        """Load what another rank's `replica_state` returned."""
        self.load_state_dict(state)

    def _state(self, optimizer: Optimizer | None) -> dict[str, Any]:
        self.settle()
        self.updater.update_average(is_used=optimizer is not None)  # not for `replica_state`, which is not collective
        compressed, average = self.strategy.compressed, self.updater.average
        return {
            **({} if average is None or not average.values else {"ema": average.state_dict()}),
            **({} if compressed is None else {"compression": model_state.compression_state(compressed)}),
            # Layers that callbacks have frozen or unfrozen: a resumed run, or another rank, does not call them again.
            "trained": {
                name: parameter.requires_grad
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad != (name in self._began_trained)
            },
            "run": self._identity(),
            "plan": self._planned(),
            "machine": reproducible.describe_machine(self.device),
            "num_steps_done": self.num_steps_done,
            **self.updater.state_dict(),
            **model_state.local_state_dict(self._model, optimizer),
            "stream": self.batches.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, on any number of devices.

        Raises:
            ConfigurationError: It belongs to a run with other data, another order of samples or another model.
        """
        for name, value in self._identity().items():
            if state["run"].get(name) != value:
                raise ConfigurationError(
                    f"The checkpoint is of a run with {name} {state['run'].get(name)}, this one has {value}.\n"
                    "Resume with the same settings, or start a new run with resume=False (--no-resume)."
                )
        try:
            model_state.load_state_dict(self._model, self.optimizer if "optimizer" in state else None, state)
            if self.strategy.compressed is not None:
                model_state.load_compression_state(self.strategy.compressed, state.get("compression"))
            self.strategy.load_state_dict(state, self.optimizer)
            if self.updater.average is not None:
                self.updater.average.load_state_dict(state.get("ema", {}))
        except CheckpointError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"The checkpoint does not fit the task's model or optimizer: {error}\n"
                "Resume with the same task, or start a new run with resume=False (--no-resume)."
            ) from error
        self._switch(state.get("trained", {}))
        before, planned = state.get("plan", {}), self._planned()
        self.changes = [
            f"{name} from {before[name]} to {value}"
            for name, value in planned.items()
            if before.get(name, value) != value
        ]
        self.num_steps_done = state["num_steps_done"]
        self.updater.load_state_dict(state, keeps_rates=before.get("learning rate") == planned["learning rate"])
        self.batches.seek(self.num_steps_done, state.get("stream"))
        now = reproducible.describe_machine(self.device)
        if self.settings.reproducible is not None and state["machine"] != now:
            self.caveats.append(f"the run was started on another machine: {state['machine']}, not {now}")

    def close(self) -> None:
        """Stop the loader processes, and remove the hooks of the model."""
        self._hooks.close()
        self.batches.close()
