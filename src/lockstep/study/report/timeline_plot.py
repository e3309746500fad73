"""The timeline as a drawing: a lane for what each rank did, one for its buckets, and the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.study.drawing import BLUE, GREEN, PURPLE, SKY, TEXT, VERMILION, Plot, finish_plot, make_axes
from lockstep.study.report.plotting import shown_ranks
from lockstep.study.report.timeline import Bar, Window
from lockstep.study.report.view import View

COLOURS = {
    "data_wait": ("data wait", PURPLE),
    "forward": ("forward", SKY),
    "backward": ("backward", BLUE),
    "waiting": ("waits for gradients", VERMILION),
    "optimizer": ("optimizer", GREEN),
}

NOTE = (
    "What each rank did when. Hatched is waiting; the thin lines below a bar are buckets of gradients, from ready over "
    "sent to reduced. The line above the bars is the critical path: the work that all others waited for."
)

_INCHES_WIDE = 9.6
_MOST_RANKS = 8


def draw_timeline(view: View) -> Plot | None:
    """Return the drawing; None if no step has a timeline of every rank."""
    window = view.window
    if window is None:
        return None
    ranks = shown_ranks(view)[:_MOST_RANKS]
    critical = {bar.rank for bar in window.critical}
    ranks = sorted({*ranks[: _MOST_RANKS - len(critical - set(ranks))], *critical})
    figure, axes = make_axes(1.3 + 0.62 * len(ranks), _INCHES_WIDE)
    rows = {rank: place for place, rank in enumerate(ranks)}
    _draw_bars(axes, window, rows)
    _draw_buckets(axes, window, rows)
    _draw_critical(axes, window.critical, rows)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.set_xlim(0, window.end_s * 1e3 or 1.0)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", linewidth=0.6)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "columnspacing": 1.0, "handlelength": 1.2}
    axes.legend(ncols=7, frameon=False, fontsize=9, **place)
    return finish_plot(view.named(f"Timeline of {_steps(window)}"), describe(window), figure, NOTE)


def describe(window: Window) -> str:
    """Return the critical path in words."""
    parts = []
    for step in window.steps:
        bars = [bar for bar in window.critical if bar.step == step]
        long = [bar for bar in bars if bar.end_s - bar.begin_s >= 0.02 * window.end_s / len(window.steps)]
        listed = ", ".join(f"{COLOURS[bar.phase][0]} {(bar.end_s - bar.begin_s) * 1e3:.3g}" for bar in long)
        parts.append(f"step {step + 1}, rank {bars[0].rank if bars else '?'}: {listed}")
    return f"What each rank did when. Critical path, in milliseconds: {'; '.join(parts)}."


def _steps(window: Window) -> str:
    first, last = window.steps[0] + 1, window.steps[-1] + 1
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _draw_bars(axes: Any, window: Window, rows: dict[int, int]) -> None:
    named: set[str] = set()
    for phase, (text, colour) in COLOURS.items():
        for rank, row in rows.items():
            spans = [
                (bar.begin_s * 1e3, (bar.end_s - bar.begin_s) * 1e3)
                for bar in window.bars
                if bar.rank == rank and bar.phase == phase
            ]
            if spans:
                label = None if phase in named else text
                named.add(phase)
                hatch = "////" if phase == "waiting" else None
                style = {"hatch": hatch, "edgecolor": TEXT, "linewidth": 0.4, "label": label}
                axes.broken_barh(spans, (row - 0.38, 0.42), facecolors=colour, **style)


def _draw_buckets(axes: Any, window: Window, rows: dict[int, int]) -> None:
    is_named = False
    for bucket in window.buckets:
        if bucket.rank not in rows:
            continue
        level = rows[bucket.rank] + 0.1 + 0.09 * (bucket.number % 3)
        ready_ms, sent_ms, done_ms = bucket.ready_s * 1e3, bucket.sent_s * 1e3, bucket.done_s * 1e3
        axes.plot([ready_ms, sent_ms], [level, level], color=TEXT, linewidth=1.0, linestyle=":")
        label = None if is_named else "bucket on its way"
        is_named = True
        axes.plot([sent_ms, done_ms], [level, level], color=VERMILION, linewidth=2.4, label=label)
        axes.plot([ready_ms], [level], "|", color=TEXT, markersize=5)


def _draw_critical(axes: Any, critical: Sequence[Bar], rows: dict[int, int]) -> None:
    before: Bar | None = None
    for place, bar in enumerate(bar for bar in critical if bar.rank in rows):
        level = rows[bar.rank] - 0.43
        label = "critical path" if place == 0 else None
        axes.plot([bar.begin_s * 1e3, bar.end_s * 1e3], [level, level], color=TEXT, linewidth=2.2, label=label)
        if before is not None and before.rank != bar.rank:
            crossing_ms = bar.begin_s * 1e3
            axes.plot([crossing_ms, crossing_ms], [rows[before.rank] - 0.43, level], color=TEXT, linewidth=1.2)
        before = bar
