"""The plots of a run: where the time of a step goes, curves over the steps, the timeline; none has text of a record."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from lockstep.study import drawing
from lockstep.study.report.figures import Window
from lockstep.study.report.run_reader import Step
from lockstep.study.report.view import BaselineComparison, View, by_words

# Ranks that a drawing shows; the tables have all.
MOST_ROWS = 16

MOST_POINTS = 240


def draw(view: View, baseline: BaselineComparison | None = None) -> list[drawing.Plot]:
    """Return the drawings that there are figures for."""
    plots = [
        _parts(view),
        _curve(view, None, "Throughput", "samples per second", _rate),
        _curve(view, baseline, "Loss", "loss of the global batch", lambda step: step.loss),
        _curve(view, None, "Learning rate", "learning rate", lambda step: step.learning_rate),
        _curve(view, None, "Gradient norm", "before clipping", lambda step: step.grad_norm),
    ]
    return [plot for plot in plots if plot is not None]


def _rate(step: Step) -> float:
    return step.samples / step.lasted_s if step.lasted_s else math.nan


def shown_ranks(view: View, most: int = MOST_ROWS) -> list[int]:
    """Return the ranks that a drawing shows: all, or of many those that others wait for most."""
    last_share = view.figures.last_share if view.figures is not None else {}
    return sorted(sorted(view.run.ranks, key=lambda rank: (-last_share.get(rank, 0.0), rank))[:most])


def _parts(view: View) -> drawing.Plot | None:
    if view.figures is None:
        return None
    rows = {f"rank {rank}": by_words(view.figures.by_rank[rank]) for rank in shown_ranks(view)}
    note = ""
    if len(rows) > 1:
        rows = {"critical": by_words(view.figures.critical), **rows}
        note = "The bar on top is the work that the others waited for: what shortens it shortens the step."
    return drawing.stacked_bars("Where the time of a step goes", "milliseconds per step, mean", rows, note)


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most so many points: the means of pieces."""
    # Means, not every n-th point: a step in between that took long is to be seen.
    size = math.ceil(len(points) / MOST_POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]


def _curve(
    view: View, baseline: BaselineComparison | None, heading: str, label: str, read: Callable[[Step], float | None]
) -> drawing.Plot | None:
    """Draw a figure over the steps, and the baseline's if there is one; None if it never changed."""
    views = {"this run": view} if baseline is None else {"this run": view, baseline.name: baseline.view}
    figure, axes = drawing.make_axes(2.8 if heading == "Loss" else 2.0, grid="y")
    words = []
    for (name, each), (colour, dashes) in zip(
        views.items(), ((drawing.BLUE, "-"), (drawing.VERMILION, "--")), strict=False
    ):
        points = [(step.step + 1.0, value) for step in each.run.zero.steps if (value := read(step)) is not None]
        known = [(value, step) for step, value in points if math.isfinite(value)]
        if len(set(known)) < 1 or (min(known)[0] == max(known)[0] and heading != "Loss"):
            continue
        axes.plot(*zip(*_binned(points), strict=True), color=colour, linestyle=dashes, linewidth=1.8, label=name)
        (low, low_step), (high, high_step) = min(known), max(known)
        text = f"from {points[0][1]:.3g} to {points[-1][1]:.3g}, lowest {low:.3g} in step {low_step:.0f}"
        text += f", highest {high:.3g} in step {high_step:.0f}"
        if len(known) < len(points):
            text += f", not finite in {len(points) - len(known)} steps"
        words.append(f"{name}: {text}" if len(views) > 1 else text)
    if not words:
        return None
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    if len(words) > 1:
        axes.legend()
    alt = f"Curve of the {heading.lower()} over the steps: {'; '.join(words)}."
    return drawing.finish_plot(heading, alt, figure, baseline.loss_note if baseline is not None else "")


# The timeline as a drawing: a lane for what each rank did, one for its buckets, and the critical path.

PHASES = {
    "data_wait": ("data wait", drawing.PURPLE),
    "forward": ("forward", drawing.SKY),
    "backward": ("backward", drawing.BLUE),
    "waiting": ("waits for gradients", drawing.VERMILION),
    "optimizer": ("optimizer", drawing.GREEN),
}

NOTE = (
    "What each rank did when. Hatched is waiting; the thin lines below a bar are buckets of gradients, from ready over "
    "sent to reduced. The line above the bars is the critical path: the work that all others waited for."
)

_INCHES_WIDE = 9.6
_MOST_RANKS = 8


def draw_timeline(view: View) -> drawing.Plot | None:
    """Return the drawing; None if no step has a timeline of every rank."""
    window = view.window
    if window is None:
        return None
    ranks = sorted({*shown_ranks(view, _MOST_RANKS), *(bar.rank for bar in window.critical)})
    rows = {rank: place for place, rank in enumerate(ranks)}
    figure, axes = drawing.make_axes(1.5 + 0.62 * len(ranks), grid="x", inches_wide=_INCHES_WIDE)
    _draw_bars(axes, window, rows)
    _draw_buckets(axes, window, rows)
    _draw_critical(axes, window, rows)
    drawing.label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.set_xlim(0, window.end_s * 1e3 or 1.0)
    axes.set_xlabel("milliseconds")
    drawing.legend_above(axes, 4, -0.01)
    first, last = window.steps[0] + 1, window.steps[-1] + 1
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return drawing.finish_plot(f"Timeline of {steps}", _in_words(window), figure, NOTE)


def _in_words(window: Window) -> str:
    spent_ms = defaultdict[tuple[int, str], float](float)
    for bar in window.critical:
        spent_ms[bar.rank, bar.phase] += (bar.end_s - bar.begin_s) * 1e3
    listed = ", ".join(f"rank {rank} {PHASES[phase][0]} {ms:.3g}" for (rank, phase), ms in spent_ms.items())
    return f"What each rank did when. Critical path, in milliseconds: {listed}."


def _draw_bars(axes: Any, window: Window, rows: dict[int, int]) -> None:
    for phase, (label, colour) in PHASES.items():
        hatch = "////" if phase == "waiting" else ""
        look = {"facecolors": colour, "edgecolor": drawing.TEXT, "linewidth": 0.4, "hatch": hatch}
        for rank, row in rows.items():
            bars = [bar for bar in window.bars if bar.rank == rank and bar.phase == phase]
            if bars:
                spans = [(bar.begin_s * 1e3, (bar.end_s - bar.begin_s) * 1e3) for bar in bars]
                axes.broken_barh(spans, (row - 0.38, 0.42), label=label, **look)
                label = ""  # once in the legend


def _draw_buckets(axes: Any, window: Window, rows: dict[int, int]) -> None:
    label = "bucket on its way"
    for rank, bucket in window.buckets:
        if rank in rows:
            # Three levels in turn, since buckets that follow each other overlap in time.
            level = rows[rank] + 0.1 + 0.09 * (bucket.number % 3)
            ready_ms, sent_ms, done_ms = bucket.ready_s * 1e3, bucket.sent_s * 1e3, bucket.done_s * 1e3
            axes.plot([ready_ms, sent_ms], [level, level], color=drawing.TEXT, linewidth=1.0, linestyle=":")
            axes.plot([sent_ms, done_ms], [level, level], color=drawing.VERMILION, linewidth=2.4, label=label)
            axes.plot([ready_ms], [level], "|", color=drawing.TEXT, markersize=5)
            label = ""


def _draw_critical(axes: Any, window: Window, rows: dict[int, int]) -> None:
    # One line: where the rank changes between two steps, it goes down or up to the other one.
    times = [moment * 1e3 for bar in window.critical for moment in (bar.begin_s, bar.end_s)]
    levels = [rows[bar.rank] - 0.43 for bar in window.critical for _ in range(2)]
    axes.plot(times, levels, color=drawing.TEXT, linewidth=2.2, label="critical path")
