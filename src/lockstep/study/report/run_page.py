"""The page of a run: verdict, advice, plots and tables in one HTML file; all texts from a record are escaped."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain, cycle, starmap
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from lockstep.study import drawing
from lockstep.study.common import MIB, Shown, Table
from lockstep.study.report.figures import bars_of, find_costs, find_window
from lockstep.study.report.view import BaselineComparison, View, compare_with_baseline, sentences, view_run
from lockstep.telemetry.provenance import short_commit
from lockstep.telemetry.record import Event, StepLine
from lockstep.telemetry.step_times import PARTS, Part

_MOST_TEXTS = 6
_MOST_EVENTS = 200


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of `report`: sentences, and a page that a notebook shows.

    Attributes:
        view: The run.
        baselines: The runs that it is compared with.
        costs: Sentences about its resource use.
    """

    view: View
    baselines: Sequence[BaselineComparison] = ()
    costs: Sequence[str] = ()

    @property
    def sentences(self) -> list[str]:
        """The sentences that the command prints."""
        missing = [f"Missing: {gap}" for gap in self.view.run.gaps]
        losses = [baseline.loss_note for baseline in self.baselines]
        return [*sentences(self.view, self.baselines), *recovery_texts(self.view), *self.costs, *missing, *losses]

    @property
    def page(self) -> str:
        """One HTML file, which opens offline."""
        view, baselines = self.view, self.baselines
        parts = {
            "gaps": _listing("What is missing in this record", view.run.gaps, "gaps"),
            # The first one is a part of the summary above.
            "advice": _listing("What else to change", [advice.text for advice in view.advice[1:_MOST_TEXTS]]),
            "losses": _listing("The losses beside those of other runs", [baseline.loss_note for baseline in baselines]),
            "plots": "".join(draw(view, baselines)),
            "tables": _folded([ranks_table(view), events_table(view)]),
            "costs": _listing("What it used", self.costs),
            "about": _folded([about_table(view, baselines)]),
        }
        hosts = len({record.host for record in view.run.ranks.values()})
        folder = f"{view.run.folder} (ranks: {len(view.run.ranks)}, hosts: {hosts}, starts: {len(view.run.sessions)})"
        # ISO 8601, and the commit of the task or script, in the last start.
        when, commit = (str(view.run.config.get(name, "")) for name in ("recorded", "commit/task"))
        began = when.replace("T", " ").replace("+00:00", " UTC")
        subtitle = ", ".join(filter(None, (began, commit and f"commit {short_commit(commit)}", folder)))
        body = drawing.fill("report.html", parts)
        return drawing.html_page(f"{view.task}: lockstep report", view.task, subtitle, sentences(view, baselines), body)

    def __rich__(self) -> RenderableType:
        return Text("\n".join(self.sentences))

    def _repr_html_(self) -> str:
        # A frame, since the page has its own style.
        return f'<iframe srcdoc="{escape(self.page)}" style="width: 100%; height: 50rem; border: 0"></iframe>'


def report(
    run: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    price: str | None = None,
) -> Report:
    """Return the report of a run that was recorded with ``run_dir``: speed, where the time went, advice.

    Args:
        run: Its folder.
        against: The folder of another run that it is compared with, or several.
        price: The price of a device per hour, such as ``2.50 EUR``; None: the price in the record.

    Raises:
        ConfigurationError: Nothing was recorded in a folder, or the price cannot be read.
    """
    view = view_run(Path(run))
    folders = [against] if isinstance(against, str | os.PathLike) else against or ()
    other_views = [view_run(Path(folder)) for folder in folders]
    baselines = [compare_with_baseline(view, other_view, is_only=len(other_views) == 1) for other_view in other_views]
    return Report(view, baselines, find_costs(view.run, price))


def _listing(heading: str, texts: Sequence[str], look: str = "") -> str:
    return f'<section class="{look}"><h2>{heading}</h2><ul>{drawing.items(texts)}</ul></section>' if texts else ""


def _folded(tables: Sequence[Table]) -> str:
    tables_html = {escape(table.title): drawing.html_table(table) for table in tables if table.rows}
    return "".join(f"<details><summary>{title}</summary>{table}</details>\n" for title, table in tables_html.items())


# All figures as tables: for readers who cannot see the plots, and for values that plots omit.

# The figures of a ``machine`` line: name, heading and unit.
_MACHINE = (
    ("rss_bytes", "memory of each process", "MiB"),
    ("memory_bytes", "memory of each device", "MiB"),
    ("cpu_percent", "CPU", "% of a core"),
    ("workers_cpu_percent", "loaders", "% of a core"),
    ("gpu_percent", "GPU busy", "%"),
    ("gpu_throttled_percent", "GPU slowed by power or heat", "%"),
)


def about_table(view: View, baselines: Sequence[BaselineComparison]) -> Table:
    """Return how and where a run was made; with other runs in columns of their own, and differences marked."""
    views = {"this run": view} | {baseline.name: baseline.view for baseline in baselines}
    configs = [view.run.config for view in views.values()]
    rows = [[name, *(str(config.get(name, "")) for config in configs)] for name in dict.fromkeys(chain(*configs))]
    differs = [row[0] for row in rows if len(set(row[1:])) > 1]
    return Table("Settings, machine and versions", ["", *views], rows, differs=differs)


def ranks_table(view: View) -> Table:
    """Return a row for each rank: milliseconds by part, how often it was last, memory and load."""
    figures, ranks = view.figures, view.run.ranks
    loads = {
        name: f"{heading}, {unit}"
        for name, heading, unit in _MACHINE
        if unit != "MiB" and any(record.mean(name) for record in ranks.values())
    }
    labels = (part.label for part in PARTS.values())
    columns = ["rank", "device", *labels, "all", "comes last", "peak MiB", *loads.values()]
    peak = "rss_peak_bytes" if view.device == "cpu" else "memory_peak_bytes"
    rows = []
    for rank, record in sorted(ranks.items()):
        cells = [""] * (len(PARTS) + 2)
        if rank in figures.by_rank:
            cells = [f"{figures.by_rank[rank].part(name) * 1e3:.2f}" for name in (*PARTS, "total")]
            cells.append(f"{figures.last_share[rank]:.0%}")
        peak_bytes = max((line.figures.get(peak, 0.0) for line in record.machine), default=0.0)
        cells.append(f"{peak_bytes / MIB:,.0f}" if peak_bytes else "")
        cells += ["" if (mean := record.mean(name)) is None else f"{mean:,.0f}" for name in loads]
        rows.append([str(rank), f"{record.device} on {record.host}", *cells])
    return Table("Each rank: milliseconds per step, memory and load", columns, rows, numbers=columns[2:])


def recovery_texts(view: View) -> list[str]:
    """Return sentences about the newest recoveries; the table of events has all, with their causes."""
    texts = [event.text.splitlines()[:1] for event in view.run.events if event.event == "recovery"]
    return [f"Recovery {number}: {' '.join(text)}." for number, text in enumerate(texts, 1)][-_MOST_TEXTS:]


def events_table(view: View) -> Table:
    """Return a row for each of the last events."""
    events = view.run.events
    left_out = f" (the last {_MOST_EVENTS} of {len(events)})" if len(events) > _MOST_EVENTS else ""
    rows = []
    for event in events[-_MOST_EVENTS:]:
        # Bounded, since a record may hold any number, and gmtime refuses years that are too large.
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(event.time, 2e10)))
        stood_still = "" if event.seconds is None else f"{event.seconds:.3g} s"
        rows.append([when, str(event.step), event.event, stood_still, event.text])
    return Table(f"Events{left_out}", ["time (UTC)", "after step", "event", "stood still", "what happened"], rows)


# The plots: where the time of a step goes, the timeline, curves over the steps and over the time.

# Ranks that a plot shows; the tables have all.
MOST_ROWS = 16

# Of a curve; more would not be seen without a large zoom.
MOST_POINTS = 600

# The load of a shorter run is plotted over seconds, not minutes.
_SHORT_S = 180

# Metrics of each kind: a record may have any number.
_MOST_METRICS = 50

# The events that curves show. Planned ones are short lines, as there may be many.
_MARKS = dict.fromkeys(("recovery", "restart", "resume", "skipped", "error", "stop"), drawing.ORANGE)
_MARKS |= {"straggler": drawing.GREY, "profile": drawing.GREY}
_PLANNED = {"checkpoint": drawing.SKY, "evaluation": drawing.GREY}

# Of runs, or of ranks.
_COLOURS = (drawing.BLUE, drawing.VERMILION, drawing.GREEN, drawing.PURPLE, drawing.ORANGE, drawing.SKY, drawing.GREY)


class _Curve(NamedTuple):
    """A curve: the name in the legend, the values by step or time, the colour, and whether each value is marked."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: str
    has_markers: bool = False


def draw(view: View, baselines: Sequence[BaselineComparison] = ()) -> list[str]:
    """Return the plots for which there are figures."""
    runs = {"this run" if baselines else "": view} | {baseline.name: baseline.view for baseline in baselines}
    events = [event for view in runs.values() for event in view.run.events]
    metrics = dict.fromkeys(name for event in events for name in event.metrics or {} if name != "loss")
    logged = dict.fromkeys(name for view in runs.values() for line in view.run.zero.steps for name in line.logged)
    begin_s, longest_s = _begin_s(view), max(view.figures.total_s for view in runs.values())
    unit, unit_s = ("second", 1) if longest_s < _SHORT_S else ("minute", 60)
    over_steps = partial(_over_steps, runs, _marks(view, lambda event: float(event.step)))
    over_time = partial(_over_time, runs, _marks(view, lambda event: (event.time - begin_s) / unit_s), unit, unit_s)
    plots = [
        _parts(view),
        draw_timeline(view),
        over_steps("Loss", "loss of the global batch", lambda step: step.loss, metric="loss"),
        *(over_steps(f"Evaluation: {name}", "evaluated", metric=name) for name in [*metrics][:_MOST_METRICS]),
        over_steps("Throughput", "samples/s", lambda step: step.samples / (step.lasted_s or math.nan)),
        over_steps("Learning rate", "learning rate", lambda step: step.learning_rate),
        over_steps("Gradient norm", "before clipping", lambda step: step.grad_norm),
        *(over_steps(f"Logged: {name}", "logged", partial(_logged, name)) for name in [*logged][:_MOST_METRICS]),
        *starmap(over_time, _MACHINE),
    ]
    return [plot for plot in plots if plot is not None]


def _logged(name: str, step: StepLine) -> float | None:
    return step.logged.get(name)


def shown_ranks(view: View, most: int = MOST_ROWS) -> list[int]:
    """Return the ranks that a plot shows: all, or if there are many, the ranks that others wait for most."""
    return sorted(sorted(view.run.ranks, key=lambda rank: (-view.figures.last_share.get(rank, 0.0), rank))[:most])


def _parts(view: View) -> str | None:
    if not view.figures.by_rank:
        return None
    ranks = {f"rank {rank}": view.figures.by_rank[rank].parts() for rank in shown_ranks(view)}
    top = {"critical": view.figures.critical.parts()} if len(ranks) > 1 else {}
    note = "The bar on top is the work that the others waited for: what shortens it shortens the step. " if top else ""
    note += f"The shares in the summary are those of {'this bar' if top else 'the bar'}."
    return drawing.stacked_bars("Where the time of a step goes", "milliseconds per step, mean", top | ranks, note)


def _over_steps(
    runs: Mapping[str, View],
    marks: Sequence[drawing.Attributes],
    heading: str,
    unit: str,
    read: Callable[[StepLine], float | None] = lambda _: None,
    *,
    metric: str = "",
) -> str | None:
    """Plot a figure of the steps, a metric of the evaluations, or both; None if no run has it."""
    curves = []
    for (name, view), colour in zip(runs.items(), cycle(_COLOURS), strict=False):
        evaluated = [(float(event.step), (event.metrics or {}).get(metric)) for event in view.run.events]
        curves += [
            _Curve(name or "training", [(step.step + 1.0, read(step)) for step in view.run.zero.steps], colour),
            _Curve(f"{name}, evaluation" if name else "evaluation", evaluated, colour if name else drawing.GREEN, True),
        ]
    return _plot_curves(heading, "step", unit, curves, marks)


def _over_time(
    runs: Mapping[str, View],
    marks: Sequence[drawing.Attributes],
    time_unit: str,
    time_unit_s: int,
    name: str,
    heading: str,
    unit: str,
) -> str | None:
    """Plot a figure of the machines: of each rank, or of several runs the means over their ranks; None if all are 0."""
    scale = MIB if unit == "MiB" else 1
    curves: list[_Curve] = []
    for (run, view), colour in zip(runs.items(), cycle(_COLOURS), strict=False):
        begin_s, points = _begin_s(view), {}
        for rank in shown_ranks(view, len(_COLOURS)):
            lines = [line for line in view.run.ranks[rank].machine[1:] if name in line.figures]
            times = [(line.time - begin_s) / time_unit_s for line in lines]
            points[f"rank {rank}"] = [*zip(times, (line.figures[name] / scale for line in lines), strict=True)]
        if run:
            points = {run: _binned(sorted(chain(*points.values())), len(points))}
        curves += map(_Curve, points, points.values(), [colour] if run else _COLOURS)
    is_used = any(value for curve in curves for _, value in curve.points)
    return _plot_curves(f"{heading[0].upper()}{heading[1:]}", time_unit, unit, curves, marks) if is_used else None


def _begin_s(view: View) -> float:
    """Return the first time in the record."""
    first = view.run.zero
    return min([*(line.time for line in first.steps[:1]), *(line.time for line in first.machine[:1])], default=0.0)


def _marks(view: View, place: Callable[[Event], float]) -> list[drawing.Attributes]:
    """Return the events of a run as vertical lines at their ``place`` on the x axis."""
    traces: list[drawing.Attributes] = []
    for name, colour in (_MARKS | _PLANNED).items():
        events = [event for event in view.run.events if event.event == name][-_MOST_EVENTS:]
        places = [round(place(event), 4) for event in events]
        texts = [" ".join(f"{name} after step {event.step}: {event.text}".split())[:100] for event in events]
        height, dash = (0.08, "solid") if name in _PLANNED else (1.0, "dash")
        trace = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "yaxis": "y2",
            "x": [*chain(*((x, x, None) for x in places))],
            "y": [0.0, height, None] * len(events),
            "text": [*chain(*((text, text, "") for text in map(drawing.plain, texts)))],
            "line": {"color": colour, "width": 1.5, "dash": dash},
            "hovertemplate": "%{text}<extra></extra>",
        }
        traces += [trace] if events else []
    return traces


def _binned(points: Sequence[tuple[float, float]], least: int = 1) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points: the means of bins of at least so many."""
    # Means instead of every n-th point, so that a slow step in between stays visible.
    size = max(least, math.ceil(len(points) / MOST_POINTS))
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]


def _plot_curves(
    heading: str, label: str, unit: str, curves: Sequence[_Curve], marks: Sequence[drawing.Attributes]
) -> str | None:
    """Plot curves with marked events; None if no curve has a value."""
    traces, words, values = [], [], set[float]()
    for curve in curves:
        points = [(x, value) for x, value in curve.points if value is not None]
        finite = [value for _, value in points if math.isfinite(value)]
        if not finite:
            continue
        values.update(finite)
        bins = _binned(points)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if curve.has_markers or len(bins) == 1 else "lines",
                "name": drawing.plain(curve.name),
                "x": [round(x, 4) for x, _ in bins],
                # JSON has no other numbers.
                "y": [float(f"{value:.5g}") if math.isfinite(value) else None for _, value in bins],
                "line": {"color": curve.colour, "width": 1.8, "dash": "dot" if curve.has_markers else "solid"},
            }
        )
        text = f"from {points[0][1]:.3g} to {points[-1][1]:.3g}, between {min(finite):.3g} and {max(finite):.3g}"
        words.append(text if curve.name == "training" else f"{curve.name}: {text}")
    if not words:
        return None
    marks = [trace for trace in marks if trace["name"] not in [curve["name"] for curve in traces]]
    counts = [f"{trace['name']} ({len(trace['x']) // 3})" for trace in marks]
    marked = f" Marked: {', '.join(counts)}." if counts else ""
    alt = f"{heading} over the {label}s: {'; '.join(words)}.{marked}"
    y_axis: drawing.Attributes = {
        "title": {"text": unit},
        "hoverformat": ".5g",
        "rangemode": "normal" if label == "step" else "tozero",
        "exponentformat": "SI" if unit == "samples/s" else "e",  # 10k, but a learning rate of 5e-4
    }
    if len(values) == 1 and any(values):
        y_axis["range"] = sorted([0.0, 2 * values.pop()])
    layout = {
        "height": 250,
        "xaxis": {"title": {"text": f"{label}s"}, "unifiedhovertitle": {"text": f"{label} %{{x}}"}},
        "yaxis": y_axis,
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }
    return drawing.plot(heading, alt, [*traces, *marks], layout)


# The timeline: a lane for each rank, with the parts of a step above and its buckets below.

_MOST_RANKS = 8
_MOST_BARS = 12

_BUCKET = Part("bucket", "", drawing.GREEN)
_QUEUED = Part("bucket, not sent", "", drawing.GREY)


def draw_timeline(view: View) -> str | None:
    """Return the plot, one step below the other; None if no step has a timeline of every rank."""
    ranks = shown_ranks(view, _MOST_RANKS)
    if not (steps := find_window(view.run)[: max(1, _MOST_BARS // max(1, len(ranks)))]):
        return None
    # Steps beside each other would be unreadable on a phone.
    labels: list[str] = []
    by_part: dict[Part, list[tuple[float, float, float]]] = {part: [] for part in (*PARTS.values(), _QUEUED, _BUCKET)}
    for step in steps:
        zero = min(timeline.time for timeline in step.values())
        bars = bars_of(view.run, step, zero)
        labels.append(f"<b>step {step[ranks[0]].step + 1}</b>")
        for rank in ranks:
            for name, begin_s, end_s in bars[rank]:
                by_part[PARTS[name]].append((len(labels) - 0.17, begin_s, end_s - begin_s))
            shift_s = step[rank].time - zero
            for number, _, ready_s, sent_s, done_s in step[rank].buckets:
                # Three levels in turn, since consecutive buckets overlap in time.
                place = len(labels) + 0.13 + 0.12 * (number % 3)
                by_part[_QUEUED].append((place, shift_s + ready_s, sent_s - ready_s))
                by_part[_BUCKET].append((place, shift_s + sent_s, done_s - sent_s))
            labels.append(f"rank {rank}")
    heights = {_QUEUED: 0.03, _BUCKET: 0.09}
    traces = [drawing.bars(part, spans, height=heights.get(part, 0.42)) for part, spans in by_part.items() if spans]
    y_axis = {"tickvals": [*range(len(labels))], "ticktext": labels, "range": [len(labels) - 0.4, -0.6]}
    note = "Thin lines below a bar are buckets of gradients, from ready over sent to reduced."
    if by_part[PARTS["core_wait"]]:
        note += " Waiting for a core is the end of each phase: only its sum in a step is known."
    alt = f"What each rank did when, as bars, in steps {', '.join(str(step[ranks[0]].step + 1) for step in steps)}."
    return drawing.plot("Timeline", alt, traces, drawing.bars_layout("milliseconds", len(labels), y_axis), note)
