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
from lockstep.study.report.beside import Beside
from lockstep.study.report.figures import Figures
from lockstep.study.report.machine_plots import draw_loads, draw_memory
from lockstep.study.report.plotting import STYLES, binned, legend_above, shown_ranks, steps_of
from lockstep.study.report.together import Parts
from lockstep.study.report.traffic_plots import draw_bandwidth, draw_latency
from lockstep.study.report.training_plots import draw_grad_norm, draw_learning_rate, draw_loss
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

_EDGE = {"edgecolor": TEXT, "linewidth": 0.5}
"""Around what is filled, as light colours alone are hard to see on a light ground."""

_HATCHES = {"wire_s": "////", "peers_s": "...."}

EVENT_MARKS = {
    "checkpoint": ("s", BLUE, "checkpoint"),
    "evaluation": ("^", GREEN, "evaluation"),
    "restart": ("X", VERMILION, "restart"),
    "resume": ("P", SKY, "resumed"),
    "skipped": ("v", PURPLE, "skipped"),
    "straggler": ("D", ORANGE, "slow rank"),
    "spike": ("o", ORANGE, "slow step"),
    "profile": ("d", GREY, "profiled"),
    "stop": ("*", VERMILION, "stopped"),
    "error": ("x", VERMILION, "error"),
}
"""By event, its mark, and what it is called."""


def draw(views: Sequence[View], beside: Beside | None = None) -> list[Plot]:
    """Return the drawings that there are figures for."""
    plots = [
        _devices(views[0]) if len(views) == 1 else None,
        _parts(views),
        _throughput(views),
        draw_loss(views, beside),
        draw_learning_rate(views),
        draw_grad_norm(views),
        draw_latency(views),
        draw_bandwidth(views),
        draw_memory(views),
        *(draw_loads(view) for view in views),
    ]
    return [plot for plot in plots if plot is not None]


def _devices(view: View) -> Plot | None:
    """Return what all devices together do: the reason why so many are not as many times as fast."""
    found = view.figures
    if found is None or len(found.by_rank) < 2:
        return None
    count = len(found.by_rank)
    devices = devices_by_part(found)
    figure, axes = make_axes(1.7)
    left = 0.0
    for name, number in devices.items():
        text, colour = PART_COLOURS[name]
        style = {**_EDGE, "height": 0.6, "hatch": _HATCHES.get(name)}
        axes.barh(0, number, left=left, color=colour, label=text if number >= 0.005 * count else None, **style)
        left += number
    axes.set_yticks([])
    axes.set_xlim(0, count)
    axes.set_xlabel("devices")
    legend_above(axes, ncols=3, left=-0.02)
    computing = devices["forward_s"] + devices["backward_s"]
    listed = ", ".join(f"{PART_COLOURS[name][0]} {number:.2f}" for name, number in devices.items())
    lost = {name: number for name, number in devices.items() if name not in ("forward_s", "backward_s")}
    most = max(lost, key=lambda name: lost[name])
    note = f"On average {computing:.2g} of {count} devices compute forward and backward"
    if lost[most] >= 0.02 * count:
        note += f"; most of the rest goes into {PART_NAMES[most]} ({lost[most]:.2g})"
    alt = f"One bar, {count} devices long, by what they do on average: {listed}."
    return finish_plot(f"Why {count} devices are not {count} times as fast", alt, figure, f"{note}.")


PART_NAMES = {
    "data_wait_s": "waiting for data",
    "wire_s": "the exchange of gradients",
    "peers_s": "waiting for other ranks",
    "optimizer_s": "the optimizer, which each of them runs",
    "other_s": "what is between and beside these",
}
"""What is not forward and backward, in words."""


def devices_by_part(figures: Figures) -> dict[str, float]:
    """Return as how many devices' worth of time goes into each part of a step."""
    total_s = fmean(parts.total_s for parts in figures.by_rank.values()) or 1.0
    return {name: sum(getattr(parts, name) for parts in figures.by_rank.values()) / total_s for name in PART_COLOURS}


def _throughput(views: Sequence[View]) -> Plot | None:
    if not any(view.figures for view in views):
        return None
    figure, axes = make_axes(3.1)
    words, named = [], set()
    for view, (colour, dash) in zip(views, STYLES, strict=False):
        steps = steps_of(view)
        if not steps:
            continue
        zero = steps[0].time
        points = [(step.time - zero, step.samples / (step.lasted_s or math.nan)) for step in steps]
        line = binned(points[1:] or points)
        axes.plot(*zip(*line, strict=True), color=colour, linestyle=dash, linewidth=1.4, label=view.label or None)
        high = max((value for _, value in line if math.isfinite(value)), default=1.0)
        marked: dict[str, list[float]] = {}
        for event in view.run.events:
            if event.event in EVENT_MARKS:
                marked.setdefault(event.event, []).append(event.time - zero)
        for place, (kind, times) in enumerate(marked.items()):
            marker, mark_colour, name = EVENT_MARKS[kind]
            label = name if kind not in named else None
            named.add(kind)
            height = high * (1.08 + 0.07 * place)
            style = {"linestyle": "none", "markersize": 6, "clip_on": False}
            style |= {} if marker in "xX" else {"markeredgecolor": TEXT, "markeredgewidth": 0.6}
            axes.plot(times[:300], [height] * len(times[:300]), marker, color=mark_colour, label=label, **style)
        events = ", ".join(f"{len(times)} x {EVENT_MARKS[kind][2]}" for kind, times in marked.items()) or "no events"
        if view.figures is not None:
            words.append(view.named(f"{view.figures.samples_per_s:,.0f} on average; {events}"))
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
            style = {**_EDGE, "height": 0.62, "label": text if row == 0 else None}
            axes.barh(row, seconds * 1e3, left=left, color=colour, hatch=_HATCHES.get(name), **style)
            left += seconds * 1e3
        listed = ", ".join(f"{PART_COLOURS[name][0]} {value * 1e3:.2f}" for name, value in parts.by_name().items())
        words.append(f"{label} {left:.2f} ({listed})")
    label_rows(axes, [label for label, _ in rows])
    axes.set_xlabel("milliseconds per step, mean")
    place = {"loc": "lower left", "bbox_to_anchor": (-0.18, 1.0), "columnspacing": 1.0, "handlelength": 1.2}
    axes.legend(ncols=3, frameon=False, **place)
    note = ""
    if any(label.endswith("critical") for label, _ in rows):
        note = "The bar on top is the work that the others waited for: what shortens it shortens the step."
    return finish_plot(
        "Where the time of a step goes", f"Stacked bars of milliseconds per step: {'; '.join(words)}.", figure, note
    )
