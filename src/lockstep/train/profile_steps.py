"""Which steps of a run are profiled: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigurationError

FIRST, COUNT = 11, 3
"""By then memory is allocated, kernels are chosen and buckets have found their order."""


@dataclass(frozen=True)
class Stretches:
    """Steps in a row, once or again and again; counted from 1, in this start of the run.

    Args:
        first: The first step.
        count: How many, one after the other.
        every: Steps from the beginning of one stretch to that of the next; None: there is only one.
    """

    first: int = FIRST
    count: int = COUNT
    every: int | None = None

    def is_first(self, step: int) -> bool:
        """Return whether a stretch begins with ``step``."""
        return step == self.first or (
            self.every is not None and step > self.first and (step - self.first) % self.every == 0
        )

    def is_last(self, step: int) -> bool:
        """Return whether a stretch ends with ``step``."""
        return self.is_first(step - self.count + 1)


def check_steps(numbers: Sequence[float] | None) -> None:
    """Check what was given as ``profile_steps``.

    Raises:
        ConfigurationError: It is not two or three whole numbers, or stretches would overlap.
    """
    if numbers is None:
        return
    if len(numbers) not in (2, 3) or any(number != int(number) for number in numbers):
        raise ConfigurationError(
            f"profile_steps={tuple(numbers)} is not allowed.\n"
            "Give the first step and how many, such as 101,5; to do so again and again, also the steps from one "
            "beginning to the next, such as 101,5,1000."
        )
    if len(numbers) == 3 and numbers[2] <= numbers[1]:
        raise ConfigurationError(
            f"profile_steps={tuple(numbers)}: {numbers[1]:.0f} steps every {numbers[2]:.0f} leave none out.\n"
            "Make the third number larger than the second."
        )


def stretches_of(numbers: Sequence[float] | None, num_steps: int) -> Stretches:
    """Return the stretches that checked ``numbers`` stand for, in a run of so many steps.

    Without numbers, they are a few steps after the first ones; of a short run, its last.
    """
    if numbers is None:
        return Stretches(first=max(1, min(FIRST, num_steps - COUNT + 1)))
    first, count, *every = map(int, numbers)
    return Stretches(first, count, every[0] if every else None)
