"""What to change, from measurements alone, each with what it would gain: pure functions.

A gain is predicted as the time of a step now over that of the step without what is to go. Every rule says what it takes
for granted; what cannot be predicted from what was measured is not advised. `lockstep tune` tries what is advised, and
shows how far the prediction was off.
"""

from __future__ import annotations

from lockstep.study.report.facts import WORTH, Advice, Facts
from lockstep.study.report.rules_exchange import accumulation, buckets, busy_link, bytes_on_the_way, hidden_exchange
from lockstep.study.report.rules_work import (
    fewer_devices,
    larger_batch,
    loading,
    lower_precision,
    optimizer,
    pauses,
    pinning,
    slow_rank,
    too_small,
)

__all__ = ["Advice", "Facts", "advise"]

_RULES = (
    loading,
    pinning,
    slow_rank,
    buckets,
    bytes_on_the_way,
    busy_link,
    hidden_exchange,
    lower_precision,
    optimizer,
    fewer_devices,
    too_small,
    accumulation,
    larger_batch,
    pauses,
)


def advise(facts: Facts) -> list[Advice]:
    """Return what is worth changing: the largest gain first, and what makes it another training run last."""
    if facts.step_s <= 0:
        return []
    worth = [each for rule in _RULES for each in rule(facts) if each.gain >= WORTH]
    return sorted(worth, key=lambda each: (not each.keeps_run, -each.gain))
