"""The plots of a run: training, machine, traffic and timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from lockstep.study.drawing import BLUE, GREEN, PURPLE, SKY, TEXT, VERMILION, Plot, finish_plot, make_axes, make_bars
from lockstep.study.report.figures import Bar, Traffic, Window
from lockstep.study.report.run_reader import Step
from lockstep.study.report.view import BaselineComparison, View

# What the drawings of the report share: which ranks and steps they show, and in which colours.

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


# How training went: the loss, the learning rate and the norm of the gradient over the steps.

Points = list[tuple[float, float]]


def draw_loss(views: Sequence[View], beside: BaselineComparison | None) -> Plot | None:
    """Return the loss over the steps, and that of the run on one device if it is known."""
    curves = [(view.label or "this run", points) for view in views if (points := _points(view, lambda s: s.loss))]
    if beside is not None and (points := _points(beside.view, lambda s: s.loss)):
        curves.append((beside.name, points))
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
    note = beside.loss_note if beside is not None else ""
    return _curves("Loss", "loss of the global batch", curves, alt, note, inches_high=2.8)


def draw_learning_rate(views: Sequence[View]) -> Plot | None:
    """Return the learning rate over the steps; None if it never changed, which the settings say."""
    curves = [(view.label, _points(view, lambda s: s.learning_rate)) for view in views]
    curves = [(name, points) for name, points in curves if len({rate for _, rate in points}) > 1]
    words = [f"from {points[0][1]:.3g} to {points[-1][1]:.3g}" for _, points in curves]
    alt = f"Curve of the learning rate over the steps: {'; '.join(words)}."
    return _curves("Learning rate", "learning rate", curves, alt) if curves else None


def draw_grad_norm(views: Sequence[View]) -> Plot | None:
    """Return the norm of the gradient before clipping; None if nothing needed it."""
    curves = [(view.label, _points(view, lambda s: s.grad_norm)) for view in views]
    curves = [(name, points) for name, points in curves if any(math.isfinite(norm) for _, norm in points)]
    words = []
    for _, points in curves:
        known = [(norm, step) for step, norm in points if math.isfinite(norm)]
        words.append(f"last {known[-1][0]:.3g}, largest {max(known)[0]:.3g} in step {max(known)[1]:.0f}")
    alt = f"Curve of the norm of the gradient over the steps: {'; '.join(words)}."
    return _curves("Gradient norm", "before clipping", curves, alt) if curves else None


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
    if len(curves) > 1 or curves[0][0] not in ("", "this run"):
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


def draw_memory(views: Sequence[View]) -> Plot | None:
    """Return the most memory that each rank held, and what it held at the end."""
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
        axes.barh(row, peak, color=SKY, edgecolor=TEXT, linewidth=0.5, height=0.62, label="peak" if row == 0 else None)
        axes.barh(row, now, color=BLUE, height=0.3, label="at the end" if row == 0 else None)
        axes.annotate(f" {peak:,.0f}", (peak, row), va="center", xytext=(3, 0), textcoords="offset points")
    axes.margins(x=0.2)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    what = "of tensors on the device" if on_gpu else "of resident memory of the process"
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
    return finish_plot(view.named(heading), alt, figure)


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


def draw_latency(views: Sequence[View]) -> Plot | None:
    """Return how the buckets' trips are distributed, beside the fastest of them; all of them, the slowest too."""
    known = [(view, view.traffic) for view in views if view.traffic is not None]
    if not known:
        return None
    figure, axes = make_axes(2.8)
    words, notes = [], []
    for (view, traffic), (colour, _) in zip(known, STYLES, strict=False):
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
        notes.append(view.named(_note(traffic)))
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(plain_number)
    axes.set_xlabel("milliseconds a bucket is on its way")
    axes.set_ylabel("percent of buckets, at most")
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False, loc="lower right")
    axes.tick_params(which="both", color=TEXT)
    alt = f"Share of buckets over milliseconds: {'; '.join(words)}."
    return finish_plot("Communication", alt, figure, " ".join(notes))


def _note(traffic: Traffic) -> str:
    size = in_bytes(traffic.total_bytes)
    number = f"{traffic.num_buckets} buckets" if traffic.num_buckets > 1 else "one bucket"
    text = f"In each step, {size} of gradients travel in {number}."
    best_s = median(traffic.best_s.values())
    times = traffic.median_s / best_s if best_s else 0.0
    return f"{text} A trip takes {times:.1f} times what the fastest took." if times >= _BUSY else text


def draw_bandwidth(views: Sequence[View]) -> Plot | None:
    """Return the bus bandwidth of each bucket; None with one of them, whose figures are in the table."""
    known = [(view, view.traffic) for view in views if view.traffic is not None and view.traffic.num_buckets > 1]
    if len(known) != 1:  # bars of two runs hide each other; the tables have both
        return None
    view, traffic = known[0]
    figure, axes = make_axes(2.3)
    usual = [bus_bytes_per_s(traffic, number, len(view.run.ranks)) / 1e9 for number in range(traffic.num_buckets)]
    best = [
        bus_bytes_per_s(traffic, number, len(view.run.ranks), of_best=True) / 1e9
        for number in range(traffic.num_buckets)
    ]
    places = range(traffic.num_buckets)
    axes.bar(places, best, width=0.8, color=SKY, edgecolor=TEXT, linewidth=0.5, label="fastest trip")
    axes.bar(places, usual, width=0.5, color=BLUE, label="median trip")
    axes.set_xlabel("bucket, in the order in which they leave")
    axes.set_ylabel("GB/s on the bus")
    axes.grid(axis="y", linewidth=0.6)
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(-0.1, 1.0), handlelength=1.2)
    low, high = min(usual), max(usual)
    alt = (
        f"Bars of bus bandwidth by bucket: at the median trip from {low:.3g} GB/s (bucket {usual.index(low)}) to "
        f"{high:.3g} (bucket {usual.index(high)})."
    )
    return finish_plot("Bus bandwidth by bucket", alt, figure)


def bus_bytes_per_s(traffic: Traffic, number: int, num_ranks: int, *, of_best: bool = False) -> float:
    """Return the bus bandwidth of a bucket at its median trip, or its best: 2 (n - 1) / n of its bytes over the time.

    Zero if the time is.
    """
    times = [trip.wire_s for trip in traffic.trips if trip.number == number]
    seconds = min(times) if of_best else median(times)
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
