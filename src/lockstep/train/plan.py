"""What a run comes to, worked out before anything is done: devices, steps, shares, virtual shards, learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm.world import World
from lockstep.data.order import BatchSplit, GlobalOrder, cut, cut_by
from lockstep.data.stream import StreamOrder
from lockstep.errors import ConfigurationError
from lockstep.parallel.reduction_tree import LeafPlacement
from lockstep.train.settings import FitSettings, Scaling, Schedule, Settings
from lockstep.train.task import Task

# Whether the devices' shares of a global batch are what a run can do.


def check_number_of_shares(proportions: Sequence[float], num_devices: int) -> None:
    """Check that there is a share for each device.

    Raises:
        ConfigurationError: There are more or fewer.
    """
    if len(proportions) != num_devices:
        raise ConfigurationError(
            f"shares={_spell(proportions)} is for {format_devices(len(proportions))}, but this run has {num_devices}.\n"
            "Give one number for each device, or leave shares out to make them all the same."
        )


def check_samples_per_share(batch_size: int, accumulate: int, proportions: Sequence[float]) -> None:
    """Check that each share of a global batch has a sample for each micro-batch.

    Raises:
        ConfigurationError: One has not; names a size from which on all have.
    """
    if min(len(cut_by(batch_size, proportions, index)) for index in range(len(proportions))) >= accumulate:
        return
    exact = [Fraction(proportion) for proportion in proportions]
    enough = ceil(accumulate * sum(exact) / min(exact))  # from here on even the smallest is rounded down to enough
    what = "a sample" if accumulate == 1 else f"a sample in each of {accumulate} micro-batches"
    raise ConfigurationError(
        f"A global batch of {batch_size} samples, divided by shares={_spell(proportions)}, does not have {what} for "
        f"each device.\nSet the global batch size to {enough} or more, or make the shares more alike."
    )


def format_devices(number: int) -> str:
    """Return so many devices, in words."""
    return f"{number} device{'s' * (number > 1)}"


def _spell(proportions: Sequence[float]) -> str:
    return ",".join(f"{proportion:g}" for proportion in proportions)


# The learning rate as a function of the optimizer step: scaling with the batch, warm-up, decay.


@dataclass(frozen=True)
class LearningRate:
    """The factor on the optimizer's own learning rates at each optimizer step.

    Args:
        scale: From the size of the global batch; see `batch_scale`.
        warmup: Steps over which the factor rises from ``1 / warmup`` of its value to all of it.
        num_steps: Steps of the run, over which it falls.
        decay: How it falls, or a function ``(step, num_steps)`` to the factor.
    """

    scale: float
    warmup: int
    num_steps: int
    decay: Schedule | Callable[[int, int], float]

    def factor(self, step: int) -> float:
        """Return the factor at optimizer step ``step``, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.scale * warm * self._fall(step)

    def _fall(self, step: int) -> float:
        if callable(self.decay):
            return self.decay(step, self.num_steps)
        if self.decay == "constant" or step < self.warmup:
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.num_steps - self.warmup))
        return 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def batch_scale(rule: Scaling, batch_size: int, base_batch_size: int) -> float:
    """Return the factor on the learning rate for a global batch that differs from the base batch.

    Source: linear from Goyal et al. 2017 (arXiv:1706.02677), square root from Krizhevsky 2014 (arXiv:1404.5997).
    """
    ratio = batch_size / base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def base_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates that the optimizer was made with, by group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, base: list[float], factor: float) -> None:
    """Set each group's learning rate to its base rate times ``factor``; one that is a tensor stays one."""
    for group, rate in zip(optimizer.param_groups, base, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


# Which virtual shards each device computes: pure functions.


@dataclass(frozen=True)
class VirtualShards:
    """The virtual shards of a global batch, and where they are computed.

    Args:
        placement: Over the ranks if several train together, else over the devices of this process.
        mine: Those of each device of this process.
    """

    placement: LeafPlacement
    mine: tuple[range, ...]

    @property
    def division(self) -> BatchSplit:
        """How a global batch is divided, and what of it falls to this process."""
        return BatchSplit(self.placement.tree.num_leaves, range(self.mine[0].start, self.mine[-1].stop), 1)

    def spread(self, devices: Sequence[torch.device]) -> list[torch.device]:
        """Return the device of each virtual shard of this process."""
        return [device for leaves, device in zip(self.mine, devices, strict=True) for _ in leaves]


def place_shards(num_leaves: int, num_devices: int, proportions: Sequence[float] | None) -> LeafPlacement:
    """Return the virtual shards of each device: contiguous, as evenly or by ``proportions`` as they come.

    Raises:
        ConfigurationError: There is none for some device, or a proportion too many or too few.
    """
    if proportions is None:
        ranges = tuple(cut(num_leaves, num_devices, device) for device in range(num_devices))
    else:
        check_number_of_shares(proportions, num_devices)
        ranges = tuple(cut_by(num_leaves, proportions, device) for device in range(num_devices))
    if not all(ranges):
        idle = sum(not leaves for leaves in ranges)
        raise ConfigurationError(
            f"reproducible={num_leaves} leaves {idle} of {num_devices} devices without a virtual shard.\n"
            "Cut the global batch into more, or train on fewer devices."
        )
    return LeafPlacement(ranges)


def require_whole_shards(batch_size: int, num_leaves: int) -> None:
    """Check that a global batch divides into virtual shards of one size.

    Raises:
        ConfigurationError: It does not; names the nearest sizes that do.
    """
    if batch_size % num_leaves:
        below = batch_size // num_leaves * num_leaves
        nearest = f"{below} or {below + num_leaves}" if below else f"{num_leaves}"
        raise ConfigurationError(
            f"The global batch of {batch_size} samples does not divide into reproducible={num_leaves} virtual shards.\n"
            f"Set the global batch size to {nearest}."
        )


# Which devices a run trains on, checked against what there is.

PER_PROCESS = ("ddp", "ddp-zero1", "fsdp", "torch-ddp")
"""The strategies with one process for each device."""


def devices_of(settings: FitSettings, world: World) -> list[torch.device]:
    """Return this process's devices.

    Raises:
        ConfigurationError: ``devices`` does not fit the processes that were started, or the GPUs of this machine.
    """
    strategy, wanted = settings.strategy, settings.devices
    if strategy in PER_PROCESS:
        if wanted is not None and wanted != world.world_size:
            started = f"{world.world_size} process{'es' * (world.world_size > 1)}"
            raise ConfigurationError(
                f"Strategy {strategy} on {wanted} devices needs as many processes, but this run has {started}.\n"
                f"Start them with `lockstep run SCRIPT --devices {wanted}`, or leave devices out."
            )
        return [world.device]
    if world.world_size > 1:
        raise ConfigurationError(
            f"Strategy {strategy} trains in one process, but {world.world_size} were started.\n"
            "Start one, or use strategy ddp, which trains in all of them."
        )
    if strategy == "single":
        if wanted is not None and wanted > 1:
            raise ConfigurationError(
                f"Strategy single trains on one device, but devices={wanted}.\nUse strategy dp or ddp for more."
            )
        return [world.device]
    if world.device.type != "cuda":
        return [world.device] * (wanted or 1)
    return [torch.device("cuda", index) for index in range(num_devices(wanted))]


def num_devices(wanted: int | None) -> int:
    """Return the number of devices: what was asked for, else every GPU of this machine, else one CPU.

    Raises:
        ConfigurationError: The machine has fewer GPUs.
    """
    check_gpus(wanted)
    return wanted or torch.cuda.device_count() or 1


def check_gpus(wanted: int | None) -> None:
    """Check that a machine with GPUs has ``wanted`` of them.

    Raises:
        ConfigurationError: It has fewer.
    """
    there = torch.cuda.device_count()
    if wanted is not None and 0 < there < wanted:
        raise ConfigurationError(
            f"devices={wanted}, but this machine has {there} GPU{'s' if there > 1 else ''}.\n"
            f"Ask for at most {there}, or hide the GPUs to train on CPUs: CUDA_VISIBLE_DEVICES= ."
        )


# What a run comes to, worked out from task, settings and sizes before anything is done.


@dataclass(frozen=True)
class Plan:
    """A run's steps, which samples each takes, how they are divided, and the learning rate."""

    order: GlobalOrder | StreamOrder
    division: BatchSplit
    num_steps: int
    learning_rate: LearningRate
    base_batch_size: int

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return self.order.batch_size


def make_plan(task: Task, settings: Settings, division: BatchSplit, *, num_samples: int | None) -> Plan:
    """Return the plan for a data set of ``num_samples``, or for a stream if None.

    Raises:
        ConfigurationError: The global batch does not divide evenly; names the nearest ones that do. Or the number of
            steps of a stream is not given.
    """
    batch_size = settings.global_batch_size or task.global_batch_size
    if settings.reproducible is None:
        require_even(batch_size, division.num_shares, settings.accumulate, division.proportions)
    else:
        require_whole_shards(batch_size, settings.reproducible)
    order, num_steps = _lay_out(task, settings, batch_size, num_samples)
    base = settings.base_batch_size or task.global_batch_size
    return Plan(
        order=order,
        division=division,
        num_steps=num_steps,
        learning_rate=LearningRate(
            scale=batch_scale(settings.lr_scaling, batch_size, base),
            warmup=settings.warmup,
            num_steps=num_steps,
            decay=settings.schedule or task.schedule or "constant",
        ),
        base_batch_size=base,
    )


def _lay_out(
    task: Task, settings: Settings, batch_size: int, num_samples: int | None
) -> tuple[GlobalOrder | StreamOrder, int]:
    """Return which samples are in which step, and the number of steps."""
    if num_samples is not None:
        order = GlobalOrder(num_samples, batch_size, settings.seed, task.drop_last)
        if order.steps_per_epoch == 0:
            raise ConfigurationError(
                f"The data set of {num_samples} samples is smaller than a global batch of {batch_size}.\n"
                "Make the global batch smaller, or leave drop_last out of the task."
            )
        return order, settings.steps or (settings.epochs or task.epochs) * order.steps_per_epoch
    if settings.steps is None:
        raise ConfigurationError(
            "The data set is a stream without a length, so its epochs cannot be planned.\n"
            "Give the number of steps instead: steps=1000 (--steps 1000)."
        )
    return StreamOrder(batch_size, settings.seed, task.drop_last), settings.steps


def check_batch(task: Task, settings: Settings, num_devices: int) -> None:
    """Check that the global batch can be divided over ``num_devices``.

    Raises:
        ConfigurationError: It cannot; names the nearest sizes that can.
    """
    batch_size = settings.global_batch_size or task.global_batch_size
    if settings.reproducible is None:
        require_even(batch_size, num_devices, settings.accumulate, settings.shares)
    else:
        place_shards(settings.reproducible, num_devices, settings.shares)
        require_whole_shards(batch_size, settings.reproducible)


def require_even(batch_size: int, num_shares: int, accumulate: int, proportions: Sequence[float] | None = None) -> None:
    """Check that a global batch divides over devices and micro-batches: evenly, or each getting some by proportions.

    Raises:
        ConfigurationError: It does not; names the nearest sizes that do.
    """
    if proportions is not None:
        check_number_of_shares(proportions, num_shares)
        check_samples_per_share(batch_size, accumulate, proportions)
        return
    parts = num_shares * accumulate
    if batch_size % parts == 0:
        return
    below = batch_size // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{below + parts}"
    times = f"{format_devices(num_shares)}" + (f" x {accumulate} micro-batches" if accumulate > 1 else "")
    raise ConfigurationError(
        f"The global batch of {batch_size} samples does not divide by {times}.\nSet the global batch size to {nearest}."
    )
