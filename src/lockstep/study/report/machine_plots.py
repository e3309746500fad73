"""What the devices and their hosts were doing: memory, and how busy, hungry and hot they were over time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from lockstep.study.drawing import BLUE, SKY, TEXT, Plot, finish_plot, make_bars
from lockstep.study.report.plotting import MIB, RANK_STYLES, binned, legend_above, shown_ranks
from lockstep.study.report.view import View

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
