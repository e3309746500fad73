"""What the studies share: a median with the range it is known to."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CERTAINTY = 0.9
"""How sure we want to be that the true median lies within a spread."""


@dataclass(frozen=True)
class Spread:
    """A median with the range in which the true median lies, by the sign test, with 90% certainty.

    The sign test asks nothing of the noise but that rounds are alike, and a busy machine's noise is far from normal.
    Up to seven values the range is simply the lowest to the highest; fewer than five cannot reach 90%.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize ``values``, one a round.

        Raises:
            ValueError: There are no values.
        """
        if not values:
            raise ValueError("A spread needs at least one value.")
        ordered = sorted(values)
        trim = num_trimmed(len(ordered))
        return cls(median(ordered), ordered[trim], ordered[-1 - trim])

    @property
    def relative_width(self) -> float:
        """The width of the range as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def holds(self, value: float) -> bool:
        """Say whether ``value`` lies within the range, so that the measurement cannot tell the two apart."""
        return self.low <= value <= self.high


def num_trimmed(num_values: int) -> int:
    """Return how many values may be cut off at either end before the certainty falls under 90%.

    The median lies outside the range from the (t+1)-th lowest to the (t+1)-th highest of n values exactly when at most
    t of them fall on one of its sides, each being a fair coin: the chance is 2 * P(Binomial(n, 1/2) <= t).
    """
    tail = 0.0
    for trim in range((num_values + 1) // 2):
        tail += comb(num_values, trim) / 2**num_values
        if 2 * tail > 1 - CERTAINTY:
            return max(trim - 1, 0)
    return 0


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Summarize the ratios of two contenders, round by round.

    Both ran within the same few seconds of each round, so what the machine did meanwhile hits both and cancels.

    Raises:
        ValueError: The two do not have the same number of rounds.
    """
    return Spread.of([n / d for n, d in zip(numerators, denominators, strict=True)])
