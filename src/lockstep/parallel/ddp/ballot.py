"""What each rank says of its weight in a step, and what the sum over the ranks tells; pure functions.

[Note: ballots]
A few numbers that are summed together with the gradients, as the end of each bucket's tail:

    [weight, 1 if this rank gave one, missing ranks 0-7, missing ranks 8-15, ...]

Where rank r gave no weight for some of its micro-batches, 2**(r mod 8) is added to the number of its eight ranks. Sums
of different powers below 2**8 are exact in every dtype, bfloat16 included, so the sum names the ranks. A rank without
data (in ``join()``) sends zeros: it neither gave a weight nor left one out. Weights are divided by the typical weight
of earlier steps, see [Note: typical weight] in weights.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from lockstep.errors import ConfigurationError

_RANKS_PER_NUMBER = 8
_ADVICE = (
    "Call model.weight(n) before each backward, or lockstep.backward(loss, count=n), on all ranks or on none; "
    "n is 0 where a batch holds nothing that counts."
)


@dataclass(frozen=True)
class Ballot:
    """What one rank says: its weight, whether it gave one, and whether one was missing."""

    weight: float = 0.0
    is_weighed: bool = False
    is_missing: bool = False

    def encode(self, rank: int, world_size: int) -> list[float]:
        """Return the numbers to be summed."""
        missing = [0.0] * -(-world_size // _RANKS_PER_NUMBER)
        if self.is_missing:
            missing[rank // _RANKS_PER_NUMBER] = float(2 ** (rank % _RANKS_PER_NUMBER))
        return [self.weight, float(self.is_weighed), *missing]


@dataclass(frozen=True)
class Tally:
    """What all ranks said: the sum of the weights, whether any rank gave one, and which ranks left one out."""

    weight: float
    is_weighed: bool
    missing: tuple[int, ...]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> Tally:
        """Read the sum of all ranks' ballots."""
        weight, num_weighed, *masks = numbers
        missing = [
            _RANKS_PER_NUMBER * place + bit
            for place, mask in enumerate(masks)
            for bit in range(_RANKS_PER_NUMBER)
            if int(mask) >> bit & 1
        ]
        return cls(weight, num_weighed > 0, tuple(missing))

    def check(self) -> None:
        """Refuse weights that came with some backwards only.

        Raises:
            ConfigurationError: Some ranks gave weights, and some left one out; names the latter.
        """
        if self.is_weighed and self.missing:
            who = "rank " if len(self.missing) == 1 else "ranks "
            raise ConfigurationError(
                f"A weight is missing in this step: {who}{', '.join(map(str, self.missing))} ran a backward without "
                f"one, but other backwards of the step had theirs.\n{_ADVICE}"
            )

    def correction(self, world_size: int, *, tolerance: float) -> float:
        """Return what makes of the sum over the ranks, divided by their number, the weighted mean.

        Args:
            world_size: The number of ranks.
            tolerance: How far from 1 the result may be to be taken as 1, which saves a multiplication.
        """
        if self.weight == 0:
            return 1.0  # all gradients are zero
        factor = world_size / self.weight
        return 1.0 if abs(factor - 1) <= tolerance else factor


def check_weight(weight: Any) -> float:
    """Return the weight of a micro-batch as a number; blocks on a tensor that is still being computed.

    Raises:
        ConfigurationError: It is no number, negative, infinite or NaN.
    """
    is_number = isinstance(weight, Real) or (
        isinstance(weight, Tensor) and weight.dim() == 0 and not weight.is_complex()
    )
    if not is_number:
        what = f"a tensor of shape {list(weight.shape)}" if isinstance(weight, Tensor) else f"{weight!r}"
        raise ConfigurationError(
            f"The weight of a batch must be a number or a tensor with no dimensions, not {what}.\n"
            "Give how many samples or tokens the loss is the mean of."
        )
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ConfigurationError(
            f"The weight of a batch must be zero or more and finite, not {number:g}.\n"
            "Give how many samples or tokens the loss is the mean of."
        )
    return number
