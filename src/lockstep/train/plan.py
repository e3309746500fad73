"""The plan of a run, computed before it starts: devices, steps, shares, virtual shards, learning rate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal

import torch

from lockstep.base.accelerator import check_count
from lockstep.base.activity import plural
from lockstep.comm.world import World
from lockstep.data.order import BatchSplit, GlobalOrder, ShardOrder
from lockstep.data.shards import HasShardOrder
from lockstep.data.stream import StreamOrder
from lockstep.errors import ConfigurationError
from lockstep.parallel.reduction_tree import LeafPlacement
from lockstep.train.settings import FitSettings, Settings, refuse_ignored
from lockstep.train.step_parts import LearningRate, batch_scale, makes_scheduler
from lockstep.train.task import Task


@dataclass(frozen=True)
class VirtualShards:
    """The virtual shards of a global batch, and their devices.

    Args:
        placement: Placement on the ranks.
        mine: The virtual shards of this process.
    """

    placement: LeafPlacement
    mine: range

    @property
    def split(self) -> BatchSplit:
        """How a global batch is divided, and the shares of this process."""
        return BatchSplit(self.placement.tree.num_leaves, self.mine, 1)


def place_shards(num_leaves: int, num_devices: int, proportions: Sequence[float] | None) -> LeafPlacement:
    """Return the virtual shards of each device: contiguous, divided evenly or by ``proportions``.

    Raises:
        ConfigurationError: A device has none, or there is not one proportion per device.
    """
    _check_number_of_shares(proportions, num_devices)
    split = BatchSplit(num_devices, range(num_devices), 1, proportions)
    ranges = tuple(split.positions(num_leaves, device) for device in range(num_devices))
    if idle := sum(not leaves for leaves in ranges):
        raise ConfigurationError(
            f"reproducible={num_leaves} leaves {idle} of {num_devices} devices without a virtual shard.\n"
            "Increase reproducible, or train on fewer devices."
        )
    return LeafPlacement(ranges)


# The strategies with one process for each device.
PER_PROCESS = ("ddp", "ddp-zero1", "fsdp", "torch-ddp", "local-sgd", "diloco")


def devices_of(settings: FitSettings, world: World) -> list[torch.device]:
    """Return this process's devices.

    Raises:
        ConfigurationError: ``devices`` does not match the number of processes, or exceeds the GPUs of this machine.
    """
    strategy, wanted = settings.strategy, None if settings.devices == "auto" else settings.devices
    is_alone = world.world_size == 1
    if strategy in PER_PROCESS and wanted not in (None, world.world_size):
        started = f"{world.world_size} process{'es' * (not is_alone)}"
        raise ConfigurationError(
            f"Strategy {strategy} on {wanted} devices needs as many processes, but this run has {started}.\n"
            f"Start them with `lockstep run SCRIPT --devices {wanted}`, or omit devices."
        )
    if strategy not in PER_PROCESS and not is_alone:
        raise ConfigurationError(
            f"Strategy {strategy} trains in one process, but {world.world_size} were started.\n"
            "Start one, or use strategy ddp, which trains in all of them."
        )
    if strategy == "single" and wanted not in (None, 1):
        raise ConfigurationError(
            f"Strategy single trains on one device, but devices={wanted}.\nUse strategy dp or ddp for more."
        )
    if strategy in (*PER_PROCESS, "single"):
        return [world.device]
    if world.device.type == "cpu":
        # Replicas on the CPU share its cores. This is useful to try out what several devices will do.
        return [world.device] * (wanted or 1)
    return [torch.device(world.device.type, index) for index in range(num_devices(wanted))]


def num_devices(wanted: int | Literal["auto"] | None) -> int:
    """Return the number of devices: ``wanted``, otherwise all GPUs of this machine, otherwise one CPU.

    Raises:
        ConfigurationError: The machine has fewer GPUs.
    """
    wanted = 0 if wanted in (None, "auto") else int(wanted)
    check_count(wanted)
    return wanted or torch.accelerator.device_count() or 1


@dataclass(frozen=True)
class Plan:
    """A run's steps, which samples each takes, how they are divided, and the learning rate."""

    order: GlobalOrder | ShardOrder | StreamOrder
    split: BatchSplit
    num_steps: int
    learning_rate: LearningRate
    base_batch_size: int


def make_plan(
    task: Task, settings: Settings, split: BatchSplit, *, num_samples: int | None, shards: HasShardOrder | None = None
) -> Plan:
    """Return the plan for a data set of ``num_samples``, which may be in ``shards``, or for a stream if None.

    Raises:
        ConfigurationError: A device or a micro-batch would never have samples; or the data set is a stream, and the
            number of steps is not given; or the data set is smaller than a global batch.
    """
    batch_size = settings.global_batch_size or task.global_batch_size
    order: GlobalOrder | ShardOrder | StreamOrder
    if num_samples is None:
        if settings.steps is None:
            raise ConfigurationError(
                "The data set is a stream without a length, so its epochs cannot be planned.\n"
                "Give the number of steps instead: steps=1000 (--steps 1000)."
            )
        order, num_steps = StreamOrder(batch_size, settings.seed, task.drop_last), settings.steps
    else:
        order = GlobalOrder(num_samples, batch_size, settings.seed, task.drop_last)
        if shards is not None:
            order = shards.make_order(batch_size, settings.seed, drop_last=task.drop_last)
            split = replace(split, num_lanes=order.num_lanes)
        if order.steps_per_epoch == 0:  # only with drop_last
            raise ConfigurationError(
                f"The data set of {num_samples} samples is smaller than a global batch of {batch_size}.\n"
                "Decrease the global batch size, or omit drop_last from the task."
            )
        num_steps = settings.steps or (settings.epochs or task.epochs) * order.steps_per_epoch
    if settings.reproducible is None or split.num_lanes is not None:
        check_split(batch_size, split)
    # The learning rate of a task was chosen for the batch size of the task.
    base = settings.base_batch_size or task.global_batch_size
    scale = batch_scale(settings.lr_scaling, batch_size, base)
    decay = settings.schedule or task.schedule or "constant"
    return Plan(order, split, num_steps, LearningRate(scale, settings.warmup, num_steps, decay), base)


def check_task(task: Task, settings: FitSettings) -> None:
    """Refuse settings that have no effect on this task.

    Raises:
        ConfigurationError: There is one.
    """
    refuse_ignored({**vars(settings), "eval_dataset": task.eval_dataset})
    if settings.warmup and settings.schedule is None and makes_scheduler(task.schedule):
        raise ConfigurationError(
            "warmup cannot be combined with a scheduler of torch.\n"
            "Omit warmup; in Task.schedule, let a LinearLR come first, in a SequentialLR."
        )
    if task.ema is not None and settings.strategy in ("local-sgd", "diloco"):
        raise ConfigurationError(
            f"Task.ema cannot be used with strategy {settings.strategy}, whose ranks hold different weights.\n"
            "Omit ema, or use strategy ddp."
        )


def check_batch(task: Task, settings: Settings, num_devices: int) -> None:
    """Check that the global batch can be divided over ``num_devices``, unevenly if need be.

    Raises:
        ConfigurationError: `check_split`'s, or there are more devices than samples or virtual shards.
    """
    batch_size = settings.global_batch_size or task.global_batch_size
    if num_devices > batch_size:
        raise ConfigurationError(
            f"A global batch of {batch_size} is too small: each of {num_devices} devices needs a sample.\n"
            f"Train on at most {plural(batch_size, 'device')}, or increase the global batch size."
        )
    if settings.reproducible is None:
        check_split(batch_size, BatchSplit(num_devices, range(num_devices), settings.accumulate, settings.shares))
    else:
        place_shards(settings.reproducible, num_devices, settings.shares)


def check_split(batch_size: int, split: BatchSplit) -> None:
    """Check that each device has a sample in each micro-batch, if it accumulates, or shares are given; and its lanes.

    Raises:
        ConfigurationError: One has none; names a sufficient batch size, or number of lanes.
    """
    num_shares, accumulate, proportions = split.num_shares, split.accumulate, split.proportions
    _check_number_of_shares(proportions, num_shares)
    if split.num_lanes is not None:
        proportions = [len(split.lanes(share)) for share in range(num_shares)]
        if idle := proportions.count(0):
            raise ConfigurationError(
                f"The {split.num_lanes} lanes of the ShardedDataset leave {idle} of {plural(num_shares, 'share')} of a "
                f"global batch of {batch_size} without one.\nGive it more lanes, of which there are at most as many as "
                "samples of a global batch, or train on fewer devices."
            )
    is_even = split.proportions is None
    # The last micro-batch of a share is its smallest. Without accumulation and proportions, every batch is allowed.
    if (is_even and accumulate == 1) or split.all_have_samples(batch_size, accumulate - 1):
        return
    exact = [Fraction(proportion) for proportion in proportions or [1] * num_shares]
    enough = ceil(accumulate * sum(exact) / min(exact))
    raise ConfigurationError(
        f"A global batch of {batch_size} samples does not have a sample for each of {plural(num_shares, 'device')} in "
        f"each of {accumulate} micro-batches.\nSet the global batch size to {enough} or more, or "
        f"{'decrease accumulate' if is_even else 'make the shares more equal'}."
    )


def _check_number_of_shares(proportions: Sequence[float] | None, num_devices: int) -> None:
    if proportions is not None and len(proportions) != num_devices:
        shares = ",".join(f"{proportion:g}" for proportion in proportions)
        raise ConfigurationError(
            f"shares={shares} is for {plural(len(proportions), 'device')}, but this run has {num_devices}.\n"
            "Give one number for each device, or omit shares for equal shares."
        )
