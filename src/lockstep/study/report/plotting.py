"""What the drawings of the report share: which ranks and steps they show, and in which colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lockstep.study.drawing import BLUE, GREEN, PURPLE, VERMILION
from lockstep.study.report.lines import Step
from lockstep.study.report.view import View

MIB = 2**20

MOST_ROWS = 16
"""Ranks that a drawing shows; the tables have all."""

MOST_POINTS = 240
STYLES = ((BLUE, "-"), (VERMILION, "--"))
"""Of the first run and of the second."""

RANK_STYLES = ((BLUE, "-"), (VERMILION, "--"), (GREEN, "-."), (PURPLE, ":"))
"""Of ranks that share axes, while they are few; dashes tell them apart without colours."""


def shown_ranks(view: View) -> list[int]:
    """Return the ranks that a drawing shows: all, or of many those that others wait for most, and the rest evenly."""
    ranks = sorted(view.run.ranks) if view.figures is None else sorted(view.figures.by_rank)
    if len(ranks) <= MOST_ROWS or view.figures is None:
        return ranks[:MOST_ROWS]
    last_share = view.figures.last_share
    chosen = set(sorted(ranks, key=lambda rank: -last_share[rank])[: MOST_ROWS // 2])
    rest = [rank for rank in ranks if rank not in chosen]
    num_rest = MOST_ROWS - len(chosen)
    chosen.update(rest[place * len(rest) // num_rest] for place in range(num_rest))
    return sorted(chosen)


def steps_of(view: View) -> list[Step]:
    """Return the steps of the first rank."""
    first = min(view.run.ranks, default=None)
    return [] if first is None else view.run.ranks[first].steps


def binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most so many points: the means of pieces."""
    size = math.ceil(len(points) / MOST_POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]


def legend_above(axes: Any, *, ncols: int, left: float = -0.1) -> None:
    """Put the legend above the axes, where it hides nothing."""
    place = {"loc": "lower left", "bbox_to_anchor": (left, 1.0), "columnspacing": 1.0, "handlelength": 1.6}
    axes.legend(ncols=ncols, frameon=False, **place)


def plain_number(value: float, _: int) -> str:
    """Return a tick of a logarithmic axis: 1, 2 and 5 times a power of ten, without exponents."""
    leading = value / 10 ** math.floor(math.log10(value)) if value > 0 else 0.0
    return f"{value:g}" if round(leading, 3) in (1, 2, 5) else ""


def in_bytes(count: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
