"""Whether the devices' shares of a global batch are what a run can do."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from lockstep.data.order import cut_by
from lockstep.errors import ConfigurationError


def require_as_many(proportions: Sequence[float], num_devices: int) -> None:
    """Check that there is a share for each device.

    Raises:
        ConfigurationError: There are more or fewer.
    """
    if len(proportions) != num_devices:
        raise ConfigurationError(
            f"shares={_spell(proportions)} is for {devices(len(proportions))}, but this run has {num_devices}.\n"
            "Give one number for each device, or leave shares out to make them all the same."
        )


def require_some(batch_size: int, accumulate: int, proportions: Sequence[float]) -> None:
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


def devices(number: int) -> str:
    """Return so many devices, in words."""
    return f"{number} device{'s' * (number > 1)}"


def _spell(proportions: Sequence[float]) -> str:
    return ",".join(f"{proportion:g}" for proportion in proportions)
