"""The plots of a run: training, machine, traffic and timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

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
from lockstep.study.report.figures import Bar, Figures, Parts, Traffic, Window
from lockstep.study.report.run_reader import Step
from lockstep.study.report.view import BaselineComparison, View

# What the drawings of the report share: which ranks and steps they show, and in which colours.

MIB = 2**20

MOST_ROWS = 16
"""Ranks that a drawing shows; the tables have all."""

MOST_POINTS = 240
STYLES = ((BLUE, "-"), (VERMILION, "--"))
"""Of the run and of its baseline."""

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


# Where the time goes: the parts of a step, what all devices together do, throughput and events.
#
# Nothing that a record holds as text gets into a drawing.

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


def draw(view: View, baseline: BaselineComparison | None = None) -> list[Plot]:
    """Return the drawings that there are figures for."""
    plots = [
        _devices(view),
        _parts(view),
        _throughput(view),
        draw_loss(view, baseline),
        draw_learning_rate(view),
        draw_grad_norm(view),
        draw_latency(view),
        draw_memory(view),
        draw_loads(view),
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


def _throughput(view: View) -> Plot | None:
    steps = steps_of(view)
    if view.figures is None or not steps:
        return None
    figure, axes = make_axes(3.1)
    zero = steps[0].time
    points = [(step.time - zero, step.samples / (step.lasted_s or math.nan)) for step in steps]
    line = binned(points[1:] or points)
    axes.plot(*zip(*line, strict=True), color=BLUE, linewidth=1.4)
    high = max((value for _, value in line if math.isfinite(value)), default=1.0)
    marked: dict[str, list[float]] = {}
    for event in view.run.events:
        if event.event in EVENT_MARKS:
            marked.setdefault(event.event, []).append(event.time - zero)
    for place, (kind, times) in enumerate(marked.items()):
        marker, colour, name = EVENT_MARKS[kind]
        style = {"linestyle": "none", "markersize": 6, "clip_on": False, "label": name}
        style |= {} if marker in "xX" else {"markeredgecolor": TEXT, "markeredgewidth": 0.6}
        height = high * (1.08 + 0.07 * place)
        axes.plot(times[:300], [height] * len(times[:300]), marker, color=colour, **style)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("samples per second")
    axes.grid(axis="y", linewidth=0.6)
    if marked:
        legend_above(axes, ncols=3)
    events = ", ".join(f"{len(times)} x {EVENT_MARKS[kind][2]}" for kind, times in marked.items()) or "no events"
    words = f"{view.figures.samples_per_s:,.0f} on average; {events}"
    return finish_plot("Throughput and events", f"Curve of samples per second: {words}.", figure)


def _parts(view: View) -> Plot | None:
    if view.figures is None:
        return None
    is_one = len(view.figures.by_rank) == 1
    rows: list[tuple[str, Parts]] = [] if is_one else [("critical", view.figures.critical)]
    rows += [(f"rank {rank}", view.figures.by_rank[rank]) for rank in shown_ranks(view)]
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
    legend_above(axes, ncols=3, left=-0.18)
    note = (
        "" if is_one else "The bar on top is the work that the others waited for: what shortens it shortens the step."
    )
    alt = f"Stacked bars of milliseconds per step: {'; '.join(words)}."
    return finish_plot("Where the time of a step goes", alt, figure, note)


# How training went: the loss, the learning rate and the norm of the gradient over the steps.

Points = list[tuple[float, float]]


def draw_loss(view: View, baseline: BaselineComparison | None) -> Plot | None:
    """Return the loss over the steps, and that of the baseline if there is one."""
    curves = [("this run", _points(view, lambda step: step.loss))]
    if baseline is not None:
        curves.append((baseline.name, _points(baseline.view, lambda step: step.loss)))
    curves = [(name, points) for name, points in curves if any(math.isfinite(loss) for _, loss in points)]
    if not curves:
        return None
    words = []
    for name, points in curves:
        known = [loss for _, loss in points if math.isfinite(loss)]
        text = f"from {points[0][1]:.4g} to {points[-1][1]:.4g}, lowest {min(known):.4g}"
        words.append(f"{name}: {text}" if len(curves) > 1 else text)
        if len(known) < len(points):
            words.append(f"not finite in {len(points) - len(known)} steps")
    alt = f"Curve of the loss over the steps: {'; '.join(words)}."
    note = baseline.loss_note if baseline is not None else ""
    return _curves("Loss", "loss of the global batch", curves, alt, note, inches_high=2.8)


def draw_learning_rate(view: View) -> Plot | None:
    """Return the learning rate over the steps; None if it never changed, which the settings say."""
    points = _points(view, lambda step: step.learning_rate)
    if len({rate for _, rate in points}) < 2:
        return None
    alt = f"Curve of the learning rate over the steps: from {points[0][1]:.3g} to {points[-1][1]:.3g}."
    return _curves("Learning rate", "learning rate", [("", points)], alt)


def draw_grad_norm(view: View) -> Plot | None:
    """Return the norm of the gradient before clipping; None if nothing needed it."""
    points = _points(view, lambda step: step.grad_norm)
    known = [(norm, step) for step, norm in points if math.isfinite(norm)]
    if not known:
        return None
    (largest, step), last = max(known), known[-1][0]
    alt = (
        f"Curve of the norm of the gradient over the steps: last {last:.3g}, largest {largest:.3g} in step {step:.0f}."
    )
    return _curves("Gradient norm", "before clipping", [("", points)], alt)


def _points(view: View, read: Callable[[Step], float | None]) -> Points:
    return [(step.step + 1.0, value) for step in steps_of(view) if (value := read(step)) is not None]


def _curves(
    heading: str, label: str, curves: Sequence[tuple[str, Points]], alt: str, note: str = "", inches_high: float = 2.0
) -> Plot:
    figure, axes = make_axes(inches_high)
    for (name, points), (colour, dash) in zip(curves, STYLES, strict=False):
        axes.plot(*zip(*binned(points), strict=True), color=colour, linestyle=dash, linewidth=1.8, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(axis="y", linewidth=0.6)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return finish_plot(heading, alt, figure, note)


# What the devices and their hosts were doing: memory, and how busy, hungry and hot they were over time.

LOADS = {
    "gpu_percent": ("GPU busy", "%"),
    "gpu_power_w": ("power", "W"),
    "gpu_temperature_c": ("temperature", "degrees C"),
    "cpu_percent": ("process", "% of a core"),
    "workers_cpu_percent": ("its loaders", "% of a core"),
}
"""What a ``machine`` line tells of load, by name: in words, and the unit."""

_FEWEST_POINTS = 3
"""Below, there is nothing to see over time; the tables have the means."""


def draw_memory(view: View) -> Plot | None:
    """Return the most memory that each rank held, and what it held at the end."""
    rows: list[tuple[str, float, float]] = []
    for rank in shown_ranks(view):
        peak, now = memory_of(view, rank)
        if peak is not None:
            rows.append((f"rank {rank}", peak / MIB, (now or peak) / MIB))
    if not rows:
        return None
    figure, axes = make_bars(len(rows), legend_rows=1)
    for row, (_, peak, now) in enumerate(rows):
        axes.barh(row, peak, color=SKY, edgecolor=TEXT, linewidth=0.5, height=0.62, label="peak" if row == 0 else None)
        axes.barh(row, now, color=BLUE, height=0.3, label="at the end" if row == 0 else None)
        axes.annotate(f" {peak:,.0f}", (peak, row), va="center", xytext=(3, 0), textcoords="offset points")
    axes.margins(x=0.2)
    label_rows(axes, [label for label, _, _ in rows])
    what = "of tensors on the device" if view.device == "cuda" else "of resident memory of the process"
    axes.set_xlabel(f"MiB {what}")
    legend_above(axes, ncols=2)
    words = [f"{label} {peak:,.0f}, at the end {now:,.0f}" for label, peak, now in rows]
    return finish_plot("Memory", f"Bars of peak MiB {what}: {'; '.join(words)}.", figure)


def draw_loads(view: View) -> Plot | None:
    """Return how busy, hungry and hot the devices were over time, as far as that was recorded."""
    known = {name: series for name in LOADS if (series := _series(view, name))}
    if not known:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 0.9 + 1.1 * len(known)), layout="constrained")
    grid = figure.subplots(len(known), 1, sharex=True, squeeze=False)
    words = []
    for (axes,), (name, series) in zip(grid, known.items(), strict=True):
        what, unit = LOADS[name]
        _draw_series(axes, series)
        axes.set_ylabel(f"{what}\n{unit}", fontsize=9)
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
        axes.grid(axis="y", linewidth=0.6)
        means = {rank: sum(value for _, value in points) / len(points) for rank, points in series.items()}
        low, high = min(means, key=lambda rank: means[rank]), max(means, key=lambda rank: means[rank])
        words.append(f"{what}, {unit}: from {means[low]:.0f} (rank {low}) to {means[high]:.0f} (rank {high})")
    grid[-1][0].set_xlabel("seconds since the first step")
    if len(view.run.ranks) > 1:
        legend_above(grid[0][0], ncols=4)
    alt = f"Curves over time, a line for each rank; means: {'; '.join(words)}."
    heading = "Devices over time" if any(name.startswith("gpu") for name in known) else "Processes over time"
    return finish_plot(heading, alt, figure)


def _draw_series(axes: Any, series: dict[int, list[tuple[float, float]]]) -> None:
    """Draw a line for each rank, or of many the least, the median and the most."""
    if len(series) <= len(RANK_STYLES):
        for (rank, points), (colour, dash) in zip(series.items(), RANK_STYLES, strict=False):
            style = {"color": colour, "linestyle": dash, "linewidth": 1.4, "label": f"rank {rank}"}
            axes.plot(*zip(*binned(points), strict=True), **style)
        return
    length = min(len(points) for points in series.values())
    columns = [sorted(points[place][1] for points in series.values()) for place in range(length)]
    times = [time for time, _ in next(iter(series.values()))[:length]]
    lowest, highest = [column[0] for column in columns], [column[-1] for column in columns]
    axes.fill_between(times, lowest, highest, color=SKY, alpha=0.5, linewidth=0, label="least to most")
    axes.plot(times, [median(column) for column in columns], color=BLUE, linewidth=1.4, label="median rank")


def _series(view: View, name: str) -> dict[int, list[tuple[float, float]]]:
    """Return a figure of the ranks over the seconds since the first step, without what was before it."""
    begins = [record.steps[0].time for record in view.run.ranks.values() if record.steps]
    zero = min(begins, default=0.0)
    found = {}
    for rank, record in sorted(view.run.ranks.items()):
        lines = record.machine[1:]  # the first is from before any step
        points = [(line.time - zero, line.figures[name]) for line in lines if name in line.figures]
        if name == "workers_cpu_percent" and not any(line.figures.get("num_workers") for line in lines):
            points = []
        if len(points) >= _FEWEST_POINTS:
            found[rank] = points
    return found


def memory_of(view: View, rank: int) -> tuple[float | None, float | None]:
    """Return the most bytes that a rank held, and the last that was seen: on its device, or of its process on CPUs."""
    names = ("memory_peak_bytes", "memory_bytes") if view.device == "cuda" else ("rss_peak_bytes", "rss_bytes")
    lines = view.run.ranks[rank].machine
    peaks = [line.figures[names[0]] for line in lines if names[0] in line.figures]
    now = [line.figures[names[1]] for line in lines if names[1] in line.figures]
    return (max(peaks) if peaks else None), (now[-1] if now else None)


# What the link did: how long buckets of gradients were on their way, and how many bytes a second that is.

_BUSY = 2.0
"""From here on a median trip is worth a sentence, in times of the fastest."""


def draw_latency(view: View) -> Plot | None:
    """Return how the buckets' trips are distributed, beside the fastest of them; all of them, the slowest too."""
    traffic = view.traffic
    if traffic is None:
        return None
    figure, axes = make_axes(2.8)
    times = sorted(trip.wire_s * 1e3 for trip in traffic.trips)
    best_ms = min(traffic.best_s.values()) * 1e3
    shares = [100 * (place + 1) / len(times) for place in range(len(times))]
    axes.step(times, shares, where="post", color=BLUE, linewidth=1.8, label="buckets")
    axes.axvline(best_ms, color=GREEN, linestyle=":", linewidth=1.6, label="the fastest")
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(plain_number)
    axes.set_xlabel("milliseconds a bucket is on its way")
    axes.set_ylabel("percent of buckets, at most")
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False, loc="lower right")
    axes.tick_params(which="both", color=TEXT)
    alt = (
        f"Share of buckets over milliseconds: {len(times)} trips of {traffic.num_buckets} buckets, median "
        f"{traffic.median_s * 1e3:.3g}, best {best_ms:.3g}, slowest {traffic.slowest.wire_s * 1e3:.3g} in step "
        f"{traffic.slowest.step + 1}."
    )
    return finish_plot("Communication", alt, figure, _note(traffic))


def _note(traffic: Traffic) -> str:
    size = in_bytes(traffic.total_bytes)
    number = f"{traffic.num_buckets} buckets" if traffic.num_buckets > 1 else "one bucket"
    text = f"In each step, {size} of gradients travel in {number}."
    best_s = median(traffic.best_s.values())
    times = traffic.median_s / best_s if best_s else 0.0
    return f"{text} A trip takes {times:.1f} times what the fastest took." if times >= _BUSY else text


def bus_bytes_per_s(traffic: Traffic, number: int, num_ranks: int) -> float:
    """Return the bus bandwidth of a bucket at its median trip: 2 (n - 1) / n of its bytes over the time; or 0."""
    seconds = median(trip.wire_s for trip in traffic.trips if trip.number == number)
    return 2 * (num_ranks - 1) / num_ranks * traffic.sizes_bytes[number] / seconds if seconds > 0 else 0.0


# The timeline as a drawing: a lane for what each rank did, one for its buckets, and the critical path.

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
    label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.set_xlim(0, window.end_s * 1e3 or 1.0)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", linewidth=0.6)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "columnspacing": 1.0, "handlelength": 1.2}
    axes.legend(ncols=7, frameon=False, fontsize=9, **place)
    return finish_plot(f"Timeline of {_steps(window)}", describe(window), figure, NOTE)


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
