"""What a run comes to, worked out from task, settings and sizes before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.data.division import Division
from lockstep.data.order import GlobalOrder
from lockstep.data.stream_reader import StreamOrder
from lockstep.errors import ConfigurationError
from lockstep.train.reproducible.placement import place, require_whole_shards
from lockstep.train.schedule import LearningRate, batch_scale
from lockstep.train.settings import Settings
from lockstep.train.shares import devices, require_as_many, require_some
from lockstep.train.task import Task


@dataclass(frozen=True)
class Plan:
    """A run's steps, which samples each takes, how they are divided, and the learning rate."""

    order: GlobalOrder | StreamOrder
    division: Division
    num_steps: int
    learning_rate: LearningRate
    base_batch_size: int

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return self.order.batch_size


def make_plan(task: Task, settings: Settings, division: Division, *, num_samples: int | None) -> Plan:
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
        place(settings.reproducible, num_devices, settings.shares)
        require_whole_shards(batch_size, settings.reproducible)


def require_even(batch_size: int, num_shares: int, accumulate: int, proportions: Sequence[float] | None = None) -> None:
    """Check that a global batch divides over devices and micro-batches: evenly, or each getting some by proportions.

    Raises:
        ConfigurationError: It does not; names the nearest sizes that do.
    """
    if proportions is not None:
        require_as_many(proportions, num_shares)
        require_some(batch_size, accumulate, proportions)
        return
    parts = num_shares * accumulate
    if batch_size % parts == 0:
        return
    below = batch_size // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{below + parts}"
    times = f"{devices(num_shares)}" + (f" x {accumulate} micro-batches" if accumulate > 1 else "")
    raise ConfigurationError(
        f"The global batch of {batch_size} samples does not divide by {times}.\nSet the global batch size to {nearest}."
    )
