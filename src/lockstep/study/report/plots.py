"""The drawings of the report; nothing that a record holds as text gets into them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from lockstep.study.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    TEXT,
    VERMILION,
    Plot,
    finish_plot,
    label_rows,
    make_axes,
    make_bars,
)
from lockstep.study.report.figures import Parts
from lockstep.study.report.lines import Step
from lockstep.study.report.view import View

PART_COLOURS = {
    "data_wait_s": ("data wait", PURPLE),
    "forward_s": ("forward", SKY),
    "backward_s": ("backward", BLUE),
    "wire_s": ("exchange", VERMILION),
    "peers_s": ("waits for ranks", ORANGE),
    "optimizer_s": ("optimizer", GREEN),
    "other_s": ("other", GREY),
}

EVENT_MARKS = {
    "checkpoint": ("s", BLUE),
    "evaluation": ("^", GREEN),
    "restart": ("X", VERMILION),
    "resume": ("P", SKY),
    "skipped": ("v", PURPLE),
    "straggler": ("D", ORANGE),
    "spike": ("o", ORANGE),
    "stop": ("*", VERMILION),
    "error": ("x", VERMILION),
}

MOST_ROWS = 16
"""Ranks that a drawing shows; the tables have all."""

_MOST_POINTS = 240
_STYLES = ((BLUE, "-"), (VERMILION, "--"))
MIB = 2**20


def draw(views: Sequence[View]) -> list[Plot]:
    """Return the drawings that there are figures for."""
    plots = [_parts(views), _throughput(views), _loss(views), _memory(views), _latency(views)]
    return [plot for plot in plots if plot is not None]


def _loss(views: Sequence[View]) -> Plot | None:
    curves = [(view, [(s.step + 1.0, s.loss) for s in _steps(view) if s.loss is not None]) for view in views]
    curves = [(view, points) for view, points in curves if any(math.isfinite(loss) for _, loss in points)]
    if not curves:
        return None
    figure, axes = make_axes(2.8)
    words = []
    for (view, points), (colour, dash) in zip(curves, _STYLES, strict=False):
        axes.plot(*zip(*_binned(points), strict=True), color=colour, linestyle=dash, linewidth=1.8, label=view.label)
        known = [loss for _, loss in points if math.isfinite(loss)]
        words.append(view.named(f"from {points[0][1]:.4g} to {points[-1][1]:.4g}, lowest {min(known):.4g}"))
        if len(known) < len(points):
            words.append(f"not finite in {len(points) - len(known)} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("loss of the global batch")
    axes.grid(axis="y", linewidth=0.6)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return finish_plot("Loss", f"Curve of the loss over the steps: {'; '.join(words)}.", figure)


def _throughput(views: Sequence[View]) -> Plot | None:
    if not any(view.figures for view in views):
        return None
    figure, axes = make_axes(3.1)
    words, named = [], set()
    top = 0.0
    for view, (colour, dash) in zip(views, _STYLES, strict=False):
        steps = _steps(view)
        if not steps:
            continue
        zero = steps[0].time
        points = [(step.time - zero, step.samples / (step.lasted_s or math.nan)) for step in steps]
        line = _binned(points[1:] or points)
        axes.plot(*zip(*line, strict=True), color=colour, linestyle=dash, linewidth=1.4, label=view.label or None)
        high = max((value for _, value in line if math.isfinite(value)), default=1.0)
        top = max(top, high)
        marked: dict[str, list[float]] = {}
        for event in view.run.events:
            if event.event in EVENT_MARKS:
                marked.setdefault(event.event, []).append(event.time - zero)
        for place, (kind, times) in enumerate(marked.items()):
            marker, mark_colour = EVENT_MARKS[kind]
            label = kind if kind not in named else None
            named.add(kind)
            height = high * (1.08 + 0.07 * place)
            style = {"linestyle": "none", "markersize": 5, "clip_on": False}
            axes.plot(times[:300], [height] * len(times[:300]), marker, color=mark_colour, label=label, **style)
        events = ", ".join(f"{len(times)} x {kind}" for kind, times in marked.items()) or "no events"
        if view.figures is not None:
            words.append(view.named(f"{view.figures.samples_per_s:,.0f} at the median; {events}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("samples per second")
    axes.grid(axis="y", linewidth=0.6)
    if named or len(views) > 1:
        axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(-0.1, 1.02), frameon=False, handlelength=1.2)
    return finish_plot("Throughput and events", f"Curve of samples per second: {'; '.join(words)}.", figure)


def _parts(views: Sequence[View]) -> Plot | None:
    rows: list[tuple[str, Parts]] = []
    for view in views:
        if view.figures is None:
            continue
        name = f"{view.label} " if view.label else ""
        if len(view.figures.by_rank) > 1:
            rows.append((f"{name}critical", view.figures.critical))
        ranks = shown_ranks(view)
        rows += [(f"{name}rank {rank}", view.figures.by_rank[rank]) for rank in ranks]
    if not rows:
        return None
    figure, axes = make_bars(len(rows), legend_rows=3)
    words = []
    for row, (label, parts) in enumerate(rows):
        left = 0.0
        for name, seconds in parts.by_name().items():
            text, colour = PART_COLOURS[name]
            hatch = {"wire_s": "////", "peers_s": "...."}.get(name)
            style = {"height": 0.62, "label": text if row == 0 else None, "hatch": hatch, "edgecolor": "none"}
            axes.barh(row, seconds * 1e3, left=left, color=colour, **style)
            left += seconds * 1e3
        listed = ", ".join(f"{PART_COLOURS[name][0]} {value * 1e3:.2f}" for name, value in parts.by_name().items())
        words.append(f"{label} {left:.2f} ({listed})")
    label_rows(axes, [label for label, _ in rows])
    axes.set_xlabel("milliseconds per step, mean")
    place = {"loc": "lower left", "bbox_to_anchor": (-0.18, 1.0), "columnspacing": 1.0, "handlelength": 1.2}
    axes.legend(ncols=3, frameon=False, **place)
    return finish_plot(
        "Where the time of a step goes", f"Stacked bars of milliseconds per step: {'; '.join(words)}.", figure
    )


def _memory(views: Sequence[View]) -> Plot | None:
    rows: list[tuple[str, float, float]] = []
    on_gpu = any(view.device == "cuda" for view in views)
    for view in views:
        for rank in shown_ranks(view):
            peak, now = memory_of(view, rank)
            if peak is not None:
                rows.append((f"{view.label} rank {rank}".strip(), peak / MIB, (now or peak) / MIB))
    if not rows:
        return None
    figure, axes = make_bars(len(rows), legend_rows=1)
    for row, (_, peak, now) in enumerate(rows):
        axes.barh(row, peak, color=SKY, height=0.62, label="peak" if row == 0 else None)
        axes.barh(row, now, color=BLUE, height=0.3, label="at the end" if row == 0 else None)
        axes.annotate(f" {peak:,.0f}", (peak, row), va="center", xytext=(3, 0), textcoords="offset points")
    axes.margins(x=0.2)
    label_rows(axes, [label for label, _, _ in rows])
    what = "of tensors on the device" if on_gpu else "of resident memory of the process"
    axes.set_xlabel(f"MiB {what}")
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.1, 1.0), frameon=False, handlelength=1.2)
    words = [f"{label} {peak:,.0f}, at the end {now:,.0f}" for label, peak, now in rows]
    return finish_plot("Memory", f"Bars of peak MiB {what}: {'; '.join(words)}.", figure)


def _latency(views: Sequence[View]) -> Plot | None:
    known = [(view, view.traffic) for view in views if view.traffic is not None]
    if not known:
        return None
    figure, axes = make_axes(2.8)
    words = []
    for (view, traffic), (colour, _) in zip(known, _STYLES, strict=False):
        times = sorted(trip.wire_s * 1e3 for trip in traffic.trips)
        best_ms = min(traffic.best_s.values()) * 1e3
        shares = [100 * (place + 1) / len(times) for place in range(len(times))]
        axes.step(times, shares, where="post", color=colour, linewidth=1.8, label=view.named("buckets"))
        axes.axvline(best_ms, color=GREEN, linestyle=":", linewidth=1.6, label=view.named("the fastest"))
        words.append(
            view.named(
                f"{len(times)} trips of {traffic.num_buckets} buckets, median {traffic.median_s * 1e3:.3g}, best "
                f"{best_ms:.3g}, slowest {traffic.slowest.wire_s * 1e3:.3g} in step {traffic.slowest.step + 1}"
            )
        )
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(_plain_number)
    axes.set_xlabel("milliseconds a bucket is on its way")
    axes.set_ylabel("percent of buckets, at most")
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False, loc="lower right")
    axes.tick_params(which="both", color=TEXT)
    return finish_plot("Communication", f"Share of buckets over milliseconds: {'; '.join(words)}.", figure)


def _plain_number(value: float, _: int) -> str:
    """Return a tick of a logarithmic axis: 1, 2 and 5 times a power of ten, without exponents."""
    leading = value / 10 ** math.floor(math.log10(value)) if value > 0 else 0.0
    return f"{value:g}" if round(leading, 3) in (1, 2, 5) else ""


def memory_of(view: View, rank: int) -> tuple[float | None, float | None]:
    """Return the most bytes that a rank held, and the last that was seen: on its device, or of its process on CPUs."""
    names = ("memory_peak_bytes", "memory_bytes") if view.device == "cuda" else ("rss_peak_bytes", "rss_bytes")
    lines = view.run.ranks[rank].machine
    peaks = [line.figures[names[0]] for line in lines if names[0] in line.figures]
    now = [line.figures[names[1]] for line in lines if names[1] in line.figures]
    return (max(peaks) if peaks else None), (now[-1] if now else None)


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


def _steps(view: View) -> list[Step]:
    """Return the steps of the first rank."""
    first = min(view.run.ranks, default=None)
    return [] if first is None else view.run.ranks[first].steps


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most so many points: the means of pieces."""
    size = math.ceil(len(points) / _MOST_POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]
