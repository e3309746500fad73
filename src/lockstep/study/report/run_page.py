"""The page of a run: verdict, advice, plots and tables in one HTML file; all texts from a record are escaped."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from lockstep.study import drawing
from lockstep.study.common import MIB, Shown, Table
from lockstep.study.report.figures import bars_of, find_costs, find_window
from lockstep.study.report.view import BaselineComparison, View, compare_with_baseline, sentences, view_run
from lockstep.telemetry.record import StepLine, Timeline
from lockstep.telemetry.step_times import PARTS

_MOST_TEXTS = 6
_MOST_EVENTS = 200
_MOST_METRICS = 6


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of `report`: sentences, and a page that a notebook shows.

    Attributes:
        view: The run.
        baseline: The run that it is compared with, if there is one.
        costs: Sentences about its resource use.
    """

    view: View
    baseline: BaselineComparison | None = None
    costs: Sequence[str] = ()

    @property
    def sentences(self) -> list[str]:
        """The sentences that the command prints."""
        missing = [f"Missing: {gap}" for gap in self.view.run.gaps]
        losses = [] if self.baseline is None else [self.baseline.loss_note]
        return [*sentences(self.view, self.baseline), *recovery_texts(self.view), *self.costs, *missing, *losses]

    @property
    def page(self) -> str:
        """One HTML file, which opens offline."""
        view, baseline = self.view, self.baseline
        with drawing.drawing_style(11.0):  # on a phone they are scaled down
            plots = draw(view, baseline)
        parts = {
            "gaps": _listing("What is missing in this record", view.run.gaps, "gaps"),
            # The first one is a part of the summary above.
            "advice": _listing("What else to change", [each.text for each in view.advice[1:_MOST_TEXTS]]),
            "plots": "".join(plots),
            "tables": _folded([ranks_table(view), events_table(view)]),
            "costs": _listing("What it used", self.costs),
            "about": _folded([about_table(view, baseline)]),
        }
        hosts = len({record.host for record in view.run.ranks.values()})
        subtitle = f"{view.run.folder} (ranks: {len(view.run.ranks)}, hosts: {hosts}, starts: {len(view.run.sessions)})"
        body = drawing.fill("report.html", parts)
        return drawing.html_page(f"{view.task}: lockstep report", view.task, subtitle, sentences(view, baseline), body)

    def __rich__(self) -> RenderableType:
        return Text("\n".join(self.sentences))

    def _repr_html_(self) -> str:
        # A frame, since the page has its own style.
        return f'<iframe srcdoc="{escape(self.page)}" style="width: 100%; height: 50rem; border: 0"></iframe>'


def report(
    run: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    price: str | None = None,
    until_loss: float | None = None,
) -> Report:
    """Return the report of a run that was recorded with ``run_dir``: speed, where the time went, advice.

    Args:
        run: Its folder.
        against: The folder of another run that it is compared with.
        price: The price of a device per hour, such as ``2.50 EUR``; None: the price in the record.
        until_loss: Also report the costs until this loss was reached.

    Raises:
        ConfigurationError: Nothing was recorded in a folder, or the price cannot be read.
    """
    view = view_run(Path(run))
    baseline = None if against is None else compare_with_baseline(view, view_run(Path(against)))
    return Report(view, baseline, find_costs(view.run, price, until_loss))


def _listing(heading: str, texts: Sequence[str], look: str = "") -> str:
    return f'<section class="{look}"><h2>{heading}</h2><ul>{drawing.items(texts)}</ul></section>' if texts else ""


def _folded(tables: Sequence[Table]) -> str:
    shown = {escape(table.title): drawing.html_table(table) for table in tables if table.rows}
    return "".join(f"<details><summary>{title}</summary>{table}</details>\n" for title, table in shown.items())


# All figures as tables: for readers who cannot see the drawings, and for values that drawings omit.

# The load values of a ``machine`` line, by name: description with unit.
LOADS = {
    "cpu_percent": "CPU, % of a core",
    "workers_cpu_percent": "loaders, % of a core",
    "core_wait_percent": "waiting for a core, %",
    "gpu_percent": "GPU busy, %",
    "gpu_throttled_percent": "GPU slowed by power or heat, %",
}


def about_table(view: View, baseline: BaselineComparison | None) -> Table:
    """Return how and where a run was made; with a baseline in a second column, and differences marked."""
    views = {"this run": view} if baseline is None else {"this run": view, baseline.name: baseline.view}
    facts = [each.run.config for each in views.values()]
    rows = [[name, *(str(each.get(name, "")) for each in facts)] for name in dict.fromkeys(chain(*facts))]
    differs = [row[0] for row in rows if len(set(row[1:])) > 1]
    return Table("Settings, machine and versions", ["", *views], rows, differs=differs)


def ranks_table(view: View) -> Table:
    """Return a row for each rank: milliseconds by part, how often it was last, memory and load."""
    figures, ranks = view.figures, view.run.ranks
    loads = [name for name in LOADS if any(record.mean(name) is not None for record in ranks.values())]
    labels = (part.label for part in PARTS.values())
    columns = ["rank", "device", *labels, "all", "comes last", "peak MiB", *(LOADS[name] for name in loads)]
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


# The plots: where the time of a step goes, curves over the steps, the timeline. None contains text from a record.

# Ranks that a drawing shows; the tables have all.
MOST_ROWS = 16

MOST_POINTS = 240


def draw(view: View, baseline: BaselineComparison | None = None) -> list[str]:
    """Return the drawings for which there are figures."""
    found = dict.fromkeys(name for event in view.run.events for name in event.metrics or {} if name != "loss")
    metrics = [*found][:_MOST_METRICS]
    logged = [*dict.fromkeys(name for line in view.run.zero.steps for name in line.logged)][:_MOST_METRICS]
    plots = [
        _parts(view),
        _curve(view, None, "Throughput", "samples/s", lambda step: step.samples / (step.lasted_s or math.nan)),
        _curve(view, baseline, "Loss", "loss of the global batch", lambda step: step.loss, metric="loss"),
        *(_curve(view, baseline, f"Evaluation: {name}", "evaluated", lambda _: None, metric=name) for name in metrics),
        _curve(view, None, "Learning rate", "learning rate", lambda step: step.learning_rate),
        _curve(view, None, "Gradient norm", "before clipping", lambda step: step.grad_norm),
        *(_curve(view, None, f"Logged: {name}", "logged", partial(_logged, name)) for name in logged),
        draw_timeline(view),
    ]
    return [plot for plot in plots if plot is not None]


def _logged(name: str, step: StepLine) -> float | None:
    return step.logged.get(name)


def shown_ranks(view: View, most: int = MOST_ROWS) -> list[int]:
    """Return the ranks that a drawing shows: all, or if there are many, those that others wait for most."""
    return sorted(sorted(view.run.ranks, key=lambda rank: (-view.figures.last_share.get(rank, 0.0), rank))[:most])


def _parts(view: View) -> str | None:
    if not view.figures.by_rank:
        return None
    ranks = {f"rank {rank}": view.figures.by_rank[rank].parts() for rank in shown_ranks(view)}
    top = {"critical": view.figures.critical.parts()} if len(ranks) > 1 else {}
    note = "The bar on top is the work that the others waited for: what shortens it shortens the step." if top else ""
    return drawing.stacked_bars("Where the time of a step goes", "milliseconds per step, mean", top | ranks, note)


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points: the means of bins."""
    # Means instead of every n-th point, so that a slow step in between stays visible.
    size = math.ceil(len(points) / MOST_POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]


# Of a step: the value that a curve shows.
_Read = Callable[[StepLine], float | None]

# The looks of a run in curves: its steps, its evaluations; then those of the run that it is compared with.
_LOOKS = ((drawing.BLUE, "-"), (drawing.GREEN, "-o"), (drawing.VERMILION, "--"), (drawing.TEXT, "--s"))


def _curve(
    view: View, baseline: BaselineComparison | None, heading: str, label: str, read: _Read, *, metric: str = ""
) -> str | None:
    """Draw a figure of the steps, a metric of the evaluations, or both, and the baseline's; None if none changed."""
    views = {"training": view} if baseline is None else {"this run": view, baseline.name: baseline.view}
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for name, each in views.items():
        curves[name] = [(step.step + 1.0, read(step)) for step in each.run.zero.steps]
        evaluated = "evaluation" if len(views) == 1 else f"{name}, evaluation"
        curves[evaluated] = [(float(event.step), (event.metrics or {}).get(metric)) for event in each.run.events]
    figure, axes = drawing.make_axes(2.8 if heading == "Loss" else 2.0, grid="y")
    words = []
    for (name, curve), (colour, look) in zip(curves.items(), _LOOKS, strict=False):
        points = [(step, value) for step, value in curve if value is not None]
        known = [value for _, value in points if math.isfinite(value)]
        if not known or (min(known) == max(known) and heading != "Loss"):
            continue
        axes.plot(*zip(*_binned(points), strict=True), look, color=colour, linewidth=1.8, markersize=4, label=name)
        text = f"from {points[0][1]:.3g} to {points[-1][1]:.3g}, between {min(known):.3g} and {max(known):.3g}"
        words.append(f"{name}: {text}" if len(views) > 1 or name == "evaluation" else text)
    if not words:
        return None
    axes.set(xlabel="step", ylabel=label)
    if len(words) > 1:
        axes.legend()
    alt = f"Curve of the {heading.lower()} over the steps: {'; '.join(words)}."
    note = baseline.loss_note if baseline is not None and heading == "Loss" else ""
    return drawing.finish_plot(heading, alt, figure, note)


# The timeline as a drawing: a lane for each rank, with its phases above and its buckets below.

# The transfer and waiting for ranks, which the timeline of a rank cannot tell apart.
_WAITING = replace(PARTS["peers"], label="waiting")

_MOST_RANKS = 8
_MOST_BARS = 12


def draw_timeline(view: View) -> str | None:
    """Return the drawing, one step below the other; None if no step has a timeline of every rank."""
    ranks = shown_ranks(view, _MOST_RANKS)
    if not (steps := find_window(view.run)[: max(1, _MOST_BARS // max(1, len(ranks)))]):
        return None
    # Steps beside each other would be unreadable on a phone.
    figure, axes = drawing.make_axes(1.3 + 0.4 * len(steps) * (len(ranks) + 1), grid="x")
    labels: list[str] = []
    for step in steps:
        zero = min(timeline.time for timeline in step.values())
        labels.append(f"step {step[ranks[0]].step + 1}")
        for rank in ranks:
            _draw_lane(axes, len(labels), step[rank], zero)
            labels.append(f"rank {rank}")
    drawing.label_rows(axes, labels, "milliseconds")
    note = "Hatched is waiting; thin lines below a bar are buckets of gradients, from ready over sent to reduced."
    alt = f"What each rank did when, as bars, in {', '.join(label for label in labels if label.startswith('step'))}."
    return drawing.finish_plot("Timeline", alt, figure, note)


def _draw_lane(axes: Any, row: int, timeline: Timeline, zero: float) -> None:
    for phase, begin_s, end_s in bars_of(timeline, zero):
        part = _WAITING if phase == "waiting" else PARTS[phase]
        drawing.draw_bar(axes, row - 0.17, part, begin_s, end_s, height=0.42)
    for bucket in timeline.buckets:
        # Three levels in turn, since consecutive buckets overlap in time.
        levels = [row + 0.13 + 0.12 * (bucket.number % 3)] * 2
        moments = (bucket.ready_s, bucket.sent_s, bucket.done_s)
        ready_ms, sent_ms, done_ms = ((timeline.time - zero + moment) * 1e3 for moment in moments)
        axes.plot([ready_ms, sent_ms], levels, color=drawing.TEXT, linewidth=1.0, linestyle=":")
        axes.plot([sent_ms, done_ms], levels, color=drawing.GREEN, linewidth=2.4, label="bucket")
