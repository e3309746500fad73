"""Where the time of a step goes, in words: pure functions of the ranks' figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.telemetry.live.snapshot import PARTS, RankFigures, Snapshot

NAMES = {
    "data_wait_s": "data wait",
    "forward_s": "forward",
    "backward_s": "backward",
    "wire_s": "exchange",
    "peers_s": "waiting for ranks",
    "optimizer_s": "optimizer",
}
"""What the parts of a step are called."""

_NAMED_SHARE = 0.03
_SLOWER = 0.05
"""A rank is called the slowest if its own work takes so much longer than that of the middle one."""


def shares(ranks: Iterable[RankFigures]) -> dict[str, float]:
    """Return what part of a step went into what, the mean over ``ranks``, by the names of `PARTS`; empty if unknown."""
    totals = dict.fromkeys(PARTS, 0.0)
    step_s = 0.0
    for each in ranks:
        if each.step_s:
            step_s += each.step_s
            for part in PARTS:
                totals[part] += getattr(each, part) or 0.0
    return {part: seconds / step_s for part, seconds in totals.items()} if step_s else {}


def name_of(part: str, ranks: Sequence[RankFigures]) -> str:
    """Return what a part is called; backward may hold the exchange, if the engine does not tell them apart."""
    if part == "backward_s" and len(ranks) > 1 and all(each.exposed_s is None for each in ranks):
        return "backward and exchange"
    return NAMES[part]


def largest(ranks: Sequence[RankFigures], count: int | None = None) -> str:
    """Return such as ``forward 41%, backward 38%``, the largest parts first; small ones are left out."""
    found = sorted(shares(ranks).items(), key=lambda item: -item[1])
    named = [f"{name_of(part, ranks)} {share:.0%}" for part, share in found if share >= _NAMED_SHARE]
    return ", ".join(named[:count])


def slowest_of(snapshot: Snapshot) -> RankFigures | None:
    """Return the rank that the others wait for, if one is clearly slower than the middle one."""
    slowest, spread = snapshot.slowest, snapshot.spread("own_s")
    if slowest is None or spread is None or len(snapshot.ranks) < 2 or snapshot.spread("exposed_s") is None:
        return None
    return slowest if spread.max > spread.median * (1 + _SLOWER) else None


def line(snapshot: Snapshot) -> str:
    """Return the progress of a run in one line, for a pipe."""
    words = [f"step {snapshot.step}/{snapshot.num_steps}"]
    if snapshot.loss is not None:
        words.append(f"loss {snapshot.loss:.4f}")
    if snapshot.samples_per_s is not None:
        words.append(f"{snapshot.samples_per_s:,.0f} samples/s")
    if snapshot.tokens_per_s is not None:
        words.append(f"{snapshot.tokens_per_s:,.0f} {snapshot.counts}/s")
    if snapshot.left_s is not None:
        words.append(f"{duration(snapshot.left_s)} left")
    if where := largest(snapshot.ranks, 3):
        words.append(where)
    if (slow := slowest_of(snapshot)) is not None:
        words.append(f"rank {slow.rank} is slowest")
    return "  ".join(words)


def summary(snapshot: Snapshot) -> str | None:
    """Return where the time of a step went, and which rank was slowest; None if that is not known.

    Args:
        snapshot: With means over the whole run.
    """
    ranks = snapshot.ranks
    step_s = snapshot.mean("step_s")
    if step_s is None:
        return None
    text = f"a step took {milliseconds(step_s)}: {largest(ranks)}"
    spread = snapshot.spread("own_s")
    if len(ranks) < 2 or spread is None or snapshot.spread("exposed_s") is None:
        return text
    slow = f"rank {spread.max_rank} ({milliseconds(spread.max)} of work in a step)"
    return f"{text}; slowest was {slow}, fastest rank {spread.min_rank} ({milliseconds(spread.min)})"


def milliseconds(seconds: float) -> str:
    """Return a short time with its unit."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.{1 if seconds >= 0.001 else 2}f} ms"


def duration(seconds: float) -> str:
    """Return such as ``45 s``, ``3:20 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def size(num_bytes: float) -> str:
    """Return bytes as MiB or GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
