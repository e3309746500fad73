"""The step loop as an object: `fit` and `compare` both drive it, a step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.comm.collectives import all_reduce
from lockstep.comm.world import World
from lockstep.data.device import Prefetcher, to_device
from lockstep.data.loader import MicroBatch, micro_batches
from lockstep.data.seeding import mix, seed_cpu, seed_device
from lockstep.train.gradients import clip_factor, global_norm, gradients, multiply_
from lockstep.train.objective import Objective, Part
from lockstep.train.plan import make_plan
from lockstep.train.precision import GradScaler
from lockstep.train.schedule import base_rates, set_rates
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.stopwatch import PhaseTimes, Stopwatch
from lockstep.train.strategy import Pass, make_strategy
from lockstep.train.tally import Tally
from lockstep.train.task import Task, build_dataset, build_model, build_optimizer

_INIT, _FORWARD = 3, 4
"""Keep the bits for initial weights and for dropout apart from those that other purposes draw from the same seed."""


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. Reading a number waits for the device to get there; nothing else does.

    Args:
        step: Counted from 0 over all epochs.
        num_samples: Samples of the global batch.
        loss: Mean over the global batch, a 0-dimensional tensor.
        grad_norm: Global norm of the gradient before clipping, if it was needed.
        updated: Whether the optimizer was stepped; not after an overflow in fp16, nor without synchronisation.
    """

    step: int
    num_samples: int
    loss: Tensor
    grad_norm: Tensor | None
    updated: bool
    _watch: Stopwatch = field(repr=False)

    @property
    def times(self) -> PhaseTimes:
        """Seconds of the step on this rank, by what they went into."""
        return self._watch.read()

    @property
    def total_s(self) -> float:
        """Seconds of the whole step on this rank."""
        return self.times.total_s


class Loop:
    """Trains a task a step at a time, for as long as it is asked to.

    Args:
        task: What to train.
        settings: How.
        world: This process among the others; only ``ddp`` and ``torch-ddp`` use the others.
        strategy: Who computes.
        devices: This process's devices; the model is on the first.

    Collective for ``ddp`` and ``torch-ddp``: every rank makes it, and calls each method that says so.

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
        self._task, self._settings, self._devices = task, settings, list(devices)
        self.device = self._devices[0]
        self.samples = build_dataset(task)
        seed_cpu(mix(settings.seed, _INIT))
        seed_device(self.device, mix(settings.seed, _INIT))
        self.model = build_model(task).to(self.device).train()
        self.optimizer = build_optimizer(task, self.model)
        objective = Objective(task, settings.precision)
        self._strategy = make_strategy(strategy, self.model, objective, world, self._devices)
        self.plan = make_plan(
            task,
            settings,
            num_samples=len(self.samples),
            num_shares=self._strategy.num_shares,
            shares=self._strategy.shares,
        )
        self._base_rates = base_rates(self.optimizer)
        self.scaler = GradScaler() if settings.precision == "fp16" else None
        self.num_steps_done = 0
        self.num_updates = 0
        self._batches: Iterator[MicroBatch] | None = None
        self._sync = True

    def step(self) -> StepRecord:
        """Train on the next global batch.

        Collective for ``ddp`` and ``torch-ddp``: every rank. Does not wait for a CUDA device, except in fp16.
        """
        watch = Stopwatch(self.device)
        tally = Tally(self.device, self._strategy.group if self._sync else None)
        self.optimizer.zero_grad(set_to_none=True)
        num_samples = 0
        for index in range(self._settings.accumulate):
            micro = self._next_batch()
            num_samples = micro.num_global
            watch.lap("data_wait_s")
            self._seed_forward(micro, index)
            self._run(micro, tally, watch, last=index == self._settings.accumulate - 1)
        tally.wait()
        watch.lap("communication_s")
        norm, updated = self._update(tally.divisor(num_samples))
        watch.lap("optimizer_s")
        record = StepRecord(self.num_steps_done, num_samples, tally.loss(), norm, updated, watch)
        self.num_steps_done += 1
        return record

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

    def close(self) -> None:
        """Stop the loader's processes."""
        self._batches = None

    def _next_batch(self) -> MicroBatch:
        if self._batches is None:
            self._batches = self._open_batches()
        batch = next(self._batches)
        return batch if isinstance(self._batches, Prefetcher) else to_device(batch, self._devices)

    def _open_batches(self) -> Iterator[MicroBatch]:
        on_cuda = self.device.type == "cuda"
        batches = micro_batches(
            self.samples,
            self.plan.order,
            self.plan.division,
            first_step=self.num_steps_done,
            collate=self._task.collate,
            workers=self._settings.workers,
            pin_memory=on_cuda,
        )
        return Prefetcher(batches, self._devices) if on_cuda else batches

    def _seed_forward(self, micro: MicroBatch, index: int) -> None:
        """Give each share of each micro-batch of each step random numbers of its own."""
        position = (self._settings.seed, _FORWARD, micro.step, index)
        seed_cpu(mix(*position, self._strategy.shares.start))
        for share, device in zip(self._strategy.shares, self._devices, strict=False):
            seed_device(device, mix(*position, share))

    def _run(self, micro: MicroBatch, tally: Tally, watch: Stopwatch, *, last: bool) -> None:
        def after_forward(parts: list[Part]) -> None:
            tally.add(parts)
            if last:
                tally.start_sum()
            if isinstance(self._batches, Prefetcher):
                self._batches.start_next()

        scale = (self.scaler.scale if self.scaler else 1.0) / micro.num_global
        self._strategy.run(micro, Pass(scale, last and self._sync, watch, after_forward))

    def _update(self, divisor: Tensor | None) -> tuple[Tensor | None, bool]:
        """Finish the gradient and step the optimizer; return the gradient's norm if it was needed, and whether."""
        if not self._sync:
            return None, False
        grads = gradients(self.model)
        factor = self._finishing_factor(divisor)
        norm = None
        if self._settings.clip is not None or self.scaler is not None:
            norm = global_norm(grads)
            norm = norm if factor is None else norm * factor.to(norm.dtype)
        if self.scaler is not None:
            assert norm is not None
            finite = self._all_finite(norm)
            self.scaler.update(finite=finite)
            if not finite:
                return norm, False
        if self._settings.clip is not None:
            assert norm is not None
            shorten = clip_factor(norm, self._settings.clip)
            factor = shorten if factor is None else factor * shorten
        if factor is not None:
            multiply_(grads, factor)
        set_rates(self.optimizer, self._base_rates, self.plan.learning_rate.factor(self.num_updates))
        self.optimizer.step()
        self.num_updates += 1
        return norm, True

    def _finishing_factor(self, divisor: Tensor | None) -> Tensor | None:
        """Return what the gradient is yet to be multiplied by, or None if that is one."""
        scale = self.scaler.scale if self.scaler else 1.0
        if divisor is None and scale == 1.0:
            return None
        return torch.full((), 1.0 / scale, device=self.device) / (1.0 if divisor is None else divisor)

    def _all_finite(self, norm: Tensor) -> bool:
        """Return whether the gradient is finite on every rank, so that all take the same decision. Blocks."""
        finite = torch.isfinite(norm).to(torch.int32)
        if self._strategy.group is not None:
            all_reduce(finite, group=self._strategy.group, op="min")
        return bool(finite.item())
