"""When a change is known to be better or worse, from the rounds in which it ran beside what there is: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.study.common import Spread, paired_ratio

NOW = "now"
"""The name in each round of the settings that a change is compared with."""

WORTH = 1.02
"""A change has to make a run so many times as fast to be taken."""

FEWEST_ROUNDS, MOST_ROUNDS = 5, 9
"""Five rounds are the fewest in which a median can be known with 90% certainty."""

_HOPELESS_ROUNDS, _HOPELESS, _CLEAR = 3, 0.97, 1.05

Round = Mapping[str, float]


def ratio_of(name: str, rounds: Sequence[Round]) -> Spread | None:
    """Return how many times as fast ``name`` was, from the rounds in which it ran; None if there are none."""
    both = [each for each in rounds if name in each]
    return paired_ratio([each[name] for each in both], [each[NOW] for each in both]) if both else None


def is_decided(name: str, rounds: Sequence[Round]) -> bool:
    """Return whether more rounds would change nothing: it is clearly slower or faster, or there were enough."""
    ratio = ratio_of(name, rounds)
    if ratio is None:
        return False
    count = sum(name in each for each in rounds)
    if count >= MOST_ROUNDS or (count >= _HOPELESS_ROUNDS and ratio.high < _HOPELESS):
        return True
    return count >= FEWEST_ROUNDS and ratio.low > _CLEAR


def is_gain(ratio: Spread | None, num_rounds: int) -> bool:
    """Return whether it is a gain outside of the noise, and large enough to matter."""
    return ratio is not None and num_rounds >= FEWEST_ROUNDS and ratio.low > 1 and ratio.median >= WORTH


def why_not(ratio: Spread | None, num_rounds: int) -> str:
    """Return why something is no gain."""
    if ratio is None:
        return "time was up before it ran"
    if ratio.high < 1:
        return "slower"
    if num_rounds < FEWEST_ROUNDS:
        return f"time was up after {num_rounds} round{'s' * (num_rounds > 1)}"
    if ratio.low <= 1:
        return "within the noise"
    return "too little to matter"
