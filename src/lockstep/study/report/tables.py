"""The tables of a run's page, and the plots of where a step's time went."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from lockstep.study.report.figures import Figures, Parts
from lockstep.study.report.plots import (
    COLOURS,
    LOADS,
    MIB,
    STYLES,
    binned,
    bus_bytes_per_s,
    draw_bandwidth,
    draw_grad_norm,
    draw_latency,
    draw_learning_rate,
    draw_loads,
    draw_loss,
    draw_memory,
    legend_above,
    memory_of,
    shown_ranks,
    steps_of,
)
from lockstep.study.report.view import BaselineComparison, View, setting_values

# The drawings of the report; nothing that a record holds as text gets into them.

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


def draw(views: Sequence[View], beside: BaselineComparison | None = None) -> list[Plot]:
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


# All figures as tables: for those who do not see the drawings, and for what drawings leave out.

_MOST_EVENTS = 200
_MOST_BARS = 400


@dataclass(frozen=True)
class Table:
    """A table under a heading; the rows named in ``differs`` are those in which two runs are not alike."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False
    differs: frozenset[str] = field(default_factory=frozenset)


def figures(views: Sequence[View]) -> list[Table]:
    """Return the tables of what was measured."""
    found = []
    for view in views:
        found += [
            *_parts_tables(view),
            *_spread(view),
            *_machine(view),
            *_buckets(view),
            *_timeline_tables(view),
            *_events(view),
        ]
    return found


def about(views: Sequence[View]) -> list[Table]:
    """Return the tables of what was run, and where."""
    columns = ["", *(view.label or "this run" for view in views)]
    found = []
    for heading, facts in (
        ("Settings", [_plain(setting_values(view.run.last)) for view in views]),
        ("Machine and versions", [_machine_facts(view) for view in views]),
        ("Ranks", [_ranks(view) for view in views]),
    ):
        names = list(dict.fromkeys(name for each in facts for name in each))
        rows = [[name, *(each.get(name, "") for each in facts)] for name in names]
        differs = frozenset(row[0] for row in rows if len(set(row[1:])) > 1)
        if rows:
            found.append(Table(heading, columns, rows, is_text=True, differs=differs))
    return found


def _parts_tables(view: View) -> list[Table]:
    if view.figures is None:
        return []
    columns = ["rank", *(text for text, _ in PART_COLOURS.values()), "all", "comes last"]
    rows = [
        [str(rank), *(f"{s * 1e3:.2f}" for s in parts.by_name().values()), f"{parts.total_s * 1e3:.2f}", f"{last:.0%}"]
        for (rank, parts), last in zip(view.figures.by_rank.items(), view.figures.last_share.values(), strict=True)
    ]
    critical = view.figures.critical
    whole = [*(f"{s * 1e3:.2f}" for s in critical.by_name().values()), f"{critical.total_s * 1e3:.2f}", ""]
    return [Table(view.named("Milliseconds per step, by rank"), columns, [*rows, ["critical path", *whole]])]


def _spread(view: View) -> list[Table]:
    """Return minimum, median and maximum over the ranks of each figure, and whose the extremes are."""
    if len(view.run.ranks) < 2:
        return []
    rows = []
    for what, values, digits in _figures_by_rank(view):
        ordered = sorted((value, rank) for rank, value in values.items())
        if not ordered:
            continue
        (low, low_rank), (high, high_rank), middle = ordered[0], ordered[-1], median(values.values())
        cells = (
            f"{low:,.{digits}f} (rank {low_rank})",
            f"{middle:,.{digits}f}",
            f"{high:,.{digits}f} (rank {high_rank})",
        )
        rows.append([what, *cells])
    return [Table(view.named("Each figure over the ranks"), ["", "least", "median", "most"], rows)] if rows else []


def _figures_by_rank(view: View) -> list[tuple[str, dict[int, float], int]]:
    """Return what is known of each rank: in words with its unit, by rank, and how many digits matter."""
    found: list[tuple[str, dict[int, float], int]] = []
    if view.figures is not None:
        by_rank, last_share = view.figures.by_rank, view.figures.last_share
        for name, (text, _) in PART_COLOURS.items():
            found.append((f"{text}, ms", {rank: getattr(parts, name) * 1e3 for rank, parts in by_rank.items()}, 2))
        found.append(("comes last, % of steps", {rank: share * 100 for rank, share in last_share.items()}, 0))
    memory = {rank: memory_of(view, rank) for rank in view.run.ranks}
    for place, text in enumerate(("memory at its peak, MiB", "memory at the end, MiB")):
        found.append(
            (text, {rank: size / MIB for rank, each in memory.items() if (size := each[place]) is not None}, 0)
        )
    for name, (text, unit) in LOADS.items():
        found.append((f"{text}, {unit}", _means(view, name), 0))
    return found


def _means(view: View, name: str) -> dict[int, float]:
    """Return the mean of a figure of ``machine`` lines by rank, without what was before the first step."""
    found = {}
    for rank, record in sorted(view.run.ranks.items()):
        lines = record.machine[1:] or record.machine
        if values := [line.figures[name] for line in lines if name in line.figures]:
            found[rank] = fmean(values)
    return found


def _machine(view: View) -> list[Table]:
    known = {name: means for name in LOADS if (means := _means(view, name))}
    columns = ["rank", "peak MiB", "MiB at the end", *(", ".join(LOADS[name]) for name in known)]
    rows = []
    for rank in sorted(view.run.ranks):
        sizes = ["-" if size is None else f"{size / MIB:,.0f}" for size in memory_of(view, rank)]
        loads = [f"{means[rank]:.0f}" if rank in means else "-" for means in known.values()]
        rows.append([str(rank), *sizes, *loads])
    return [Table(view.named("Memory and load, by rank"), columns, rows)] if rows else []


def _buckets(view: View) -> list[Table]:
    traffic = view.traffic
    if traffic is None:
        return []
    rows = []
    for number, size in enumerate(traffic.sizes_bytes):
        times = sorted(trip.wire_s for trip in traffic.trips if trip.number == number)
        seconds = [f"{time_s * 1e3:.3g}" for time_s in (times[0], times[len(times) // 2], times[-1])]
        bus = bus_bytes_per_s(traffic, number, len(view.run.ranks)) / 1e9
        rows.append([str(number), f"{size / MIB:.3g}", *seconds, f"{bus:.3g}"])
    heading = view.named("Buckets of gradients on their way")
    return [Table(heading, ["bucket", "MiB", "best ms", "median ms", "slowest ms", "bus GB/s"], rows)]


def _timeline_tables(view: View) -> list[Table]:
    if view.window is None:
        return []
    critical = set(view.window.critical)
    bars = sorted(view.window.bars, key=lambda bar: (bar.begin_s, bar.rank))[:_MOST_BARS]
    rows = [
        [
            str(bar.rank),
            str(bar.step + 1),
            COLOURS[bar.phase][0],
            f"{bar.begin_s * 1e3:.3f}",
            f"{bar.end_s * 1e3:.3f}",
            "yes" if bar in critical else "",
        ]
        for bar in bars
    ]
    columns = ["rank", "step", "what", "from ms", "to ms", "on the critical path"]
    return [Table(view.named("The timeline"), columns, rows)]


def _events(view: View) -> list[Table]:
    events = view.run.events
    if not events:
        return []
    left_out = f" (the last {_MOST_EVENTS} of {len(events)})" if len(events) > _MOST_EVENTS else ""
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(0.0, min(event.time, 2e10)))),
            str(event.step),
            event.event,
            "" if event.seconds is None else f"{event.seconds:.3g} s",
            event.text,
        ]
        for event in events[-_MOST_EVENTS:]
    ]
    columns = ["time (UTC)", "after step", "event", "stood still", "what happened"]
    return [Table(view.named(f"Events{left_out}"), columns, rows, is_text=True)]


def _plain(settings: dict[str, Any]) -> dict[str, str]:
    """Return settings as texts; those that were left at nothing are left out."""
    return {str(name): _text(value) for name, value in settings.items() if value is not None}


def _machine_facts(view: View) -> dict[str, str]:
    found: dict[str, str] = {}
    provenance = view.run.last.get("provenance")
    if isinstance(provenance, dict):
        found["recorded"] = _text(provenance.get("when"))
        for group in ("versions", "machine", "commits"):
            facts = provenance.get(group)
            if isinstance(facts, dict):
                suffix = " commit" if group == "commits" else ""
                found.update({f"{name}{suffix}": _text(value) for name, value in facts.items()})
    for name in ("backend", "global_batch_size", "num_parameters", "gradient_bytes", "workers", "num_restarts"):
        if view.run.last.get(name) is not None:
            found[name.replace("_", " ")] = _text(view.run.last[name])
    return found


def _ranks(view: View) -> dict[str, str]:
    return {f"rank {rank}": f"{record.device} on {record.host}" for rank, record in sorted(view.run.ranks.items())}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)
