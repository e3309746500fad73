"""The page of a run: verdict, advice, plots and tables in one HTML file; all texts from a record are escaped."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from typing_extensions import override

from lockstep.errors import ConfigurationError
from lockstep.study import drawing
from lockstep.study.common import MIB, Shown, Table
from lockstep.study.drawing import PARTS, html_page, html_table, items
from lockstep.study.report.figures import bars_of, find_costs
from lockstep.study.report.view import BaselineComparison, View, by_words, compare_with_baseline, sentences, view_run
from lockstep.telemetry.record import StepLine

STYLE = """
.gaps { border-left: .25rem solid #D55E00; padding: .25rem 1rem; background: var(--card); }
.gaps ul, .advice { margin: .25rem 0; padding-left: 1.25rem; }
.advice li { margin: .3rem 0; }
.verdict > li:nth-child(3) { border-left: .25rem solid #0072B2; padding-left: .75rem; }
@media (max-width: 30rem) { figure { padding: .75rem .5rem; } figcaption, .note { padding: 0 .25rem; } }
.timeline { margin-top: 1rem; }
.timeline svg { max-width: none; min-width: 44rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); }
summary:focus-visible, .scroll:focus-visible { outline: 2px solid #0072B2; outline-offset: 2px; }
tr.differs th, tr.differs td { font-weight: 600; }
@media print { details > * { display: block; } }
"""

_MOST_ADVICE = 6
_MOST_EVENTS = 200


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of `report`: sentences, and a page that a notebook shows.

    Attributes:
        view: The run.
        baseline: The run that it is compared with, if there is one.
        costs: Sentences about its resource use.
    """

    view: View
    baseline: BaselineComparison | None
    costs: Sequence[str]

    @property
    def sentences(self) -> list[str]:
        """The sentences that the command prints."""
        missing = [f"Missing: {gap}" for gap in self.view.run.gaps]
        losses = [] if self.baseline is None else [self.baseline.loss_note]
        return [*sentences(self.view, self.baseline), *self.costs, *missing, *losses]

    @property
    def page(self) -> str:
        """One HTML file, which opens offline; needs matplotlib."""
        return render(self.view, self.baseline, self.costs)

    @override
    def __rich__(self) -> RenderableType:
        return Text("\n".join(self.sentences))

    @override
    def _repr_html_(self) -> str:
        with suppress(ConfigurationError):  # matplotlib is not installed
            # A frame, since the page has its own style.
            return f'<iframe srcdoc="{escape(self.page)}" style="width: 100%; height: 50rem; border: 0"></iframe>'
        return super()._repr_html_()


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


def render(view: View, baseline: BaselineComparison | None = None, costs: Sequence[str] = ()) -> str:
    """Return the page of a run, optionally with a baseline run and with sentences about its resource use.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    with drawing.drawing_style(11.0):  # on a phone they are scaled down
        plots, timeline = draw(view, baseline), draw_timeline(view)
    # The timeline scrolls in its frame: shrunk to a phone, it would be unreadable.
    lanes = (timeline or "").replace('<div role="img"', '<div class="scroll" tabindex="0" role="img"')
    body = f"""{_gaps(view)}
{_advice(view)}
<h2 id="figures">Figures</h2>
<div class="plots">
{"".join(plots)}
</div>
{lanes.replace("<figure>", '<figure class="timeline">')}
{_folded(figure_tables(view))}
{f"<h2>What it used</h2><ul>{items(costs)}</ul>" if costs else ""}
<h2>The run</h2>
{_folded(about_tables(view, baseline))}
{_commands(view)}
<footer>
<p>Made by lockstep report. Times are means over the steps that all ranks recorded, without the first few and
without spikes. Exchange is what the rank that came last waited for gradients; what others waited longer, they waited
for it.</p>
</footer>"""
    hosts = len({record.host for record in view.run.ranks.values()})
    subtitle = f"{view.run.folder} (ranks: {len(view.run.ranks)}, hosts: {hosts}, starts: {len(view.run.sessions)})"
    return html_page(f"{view.task}: lockstep report", view.task, subtitle, sentences(view, baseline), body, STYLE)


def _gaps(view: View) -> str:
    if not view.run.gaps:
        return ""
    heading = "What is missing in this record"
    return f'<section class="gaps"><strong>{heading}</strong><ul>{items(view.run.gaps)}</ul></section>'


def _advice(view: View) -> str:
    if not view.advice:
        return ""
    how = "The largest gain first, what makes it another training run last. Each on its own, predicted from what was "
    listed = items([advice.text for advice in view.advice[:_MOST_ADVICE]])
    return f'<h2>What to change</h2><p class="soft">{how}measured here.</p><ol class="advice">{listed}</ol>'


def _folded(tables: Sequence[Table]) -> str:
    return "".join(
        f"<details><summary>{escape(table.title)}</summary>{html_table(table)}</details>\n"
        for table in tables
        if table.rows
    )


def _commands(view: View) -> str:
    command, folder = view.run.last.get("command"), view.run.last.get("working_directory")
    if not isinstance(command, str):
        return ""
    lines = [f"cd {folder}", command] if isinstance(folder, str) else [command]
    text = "<br>".join(f"<code>{escape(line)}</code>" for line in lines)
    return f"<p>To repeat it:<br>{text}</p>"


# All figures as tables: for readers who cannot see the drawings, and for values that drawings omit.

# The load values of a ``machine`` line, by name: description with unit.
LOADS = {
    "cpu_percent": "CPU, % of a core",
    "workers_cpu_percent": "loaders, % of a core",
    "core_wait_percent": "waiting for a core, %",
    "gpu_percent": "GPU busy, %",
    "gpu_throttled_percent": "GPU slowed by power or heat, %",
}


def figure_tables(view: View) -> list[Table]:
    """Return the tables of the measurements."""
    return [_by_rank(view), _events(view)]


def about_tables(view: View, baseline: BaselineComparison | None) -> list[Table]:
    """Return the tables of program and machine; with a baseline in a second column, and differences marked."""
    views = [view] if baseline is None else [view, baseline.view]
    columns = ["", "this run", *([] if baseline is None else [baseline.name])]
    found = []
    for heading, facts in (
        ("Settings", [_plain(each.run.settings) for each in views]),
        ("Machine and versions", [_machine_facts(each) for each in views]),
    ):
        names = dict.fromkeys(name for each in facts for name in each)
        rows = [[name, *(each.get(name, "") for each in facts)] for name in names]
        differs = [row[0] for row in rows if len(set(row[1:])) > 1]
        found.append(Table(heading, columns, rows, differs=differs))
    return found


def _by_rank(view: View) -> Table:
    """Return a row for each rank: milliseconds by part, how often it was last, memory and load."""
    figures = view.figures
    peak = "rss_peak_bytes" if view.device == "cpu" else "memory_peak_bytes"
    loads = [name for name in LOADS if any(_values(view, rank, name) for rank in view.run.ranks)]
    columns = [*PARTS, "all", "comes last", "peak MiB", *(LOADS[name] for name in loads)]
    rows = []
    for rank in sorted(view.run.ranks):
        cells = [""] * (len(PARTS) + 2)
        if figures is not None and rank in figures.by_rank:
            parts = figures.by_rank[rank]
            cells = [f"{seconds * 1e3:.2f}" for seconds in (*by_words(parts).values(), parts.total_s)]
            cells.append(f"{figures.last_share[rank]:.0%}")
        peaks = _values(view, rank, peak)
        cells.append(f"{max(peaks) / MIB:,.0f}" if peaks else "")
        # The first line was written before the first step.
        means = [_values(view, rank, name)[1:] for name in loads]
        rows.append([str(rank), *cells, *(f"{fmean(values):,.0f}" if values else "" for values in means)])
    return Table("Each rank: milliseconds per step, memory and load", ["rank", *columns], rows, numbers=columns)


def _values(view: View, rank: int, name: str) -> list[float]:
    return [line.figures[name] for line in view.run.ranks[rank].machine if name in line.figures]


def _events(view: View) -> Table:
    events = view.run.events
    left_out = f" (the last {_MOST_EVENTS} of {len(events)})" if len(events) > _MOST_EVENTS else ""
    rows = []
    for event in events[-_MOST_EVENTS:]:
        # Bounded, since a record may hold any number, and gmtime refuses years that are too large.
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(event.time, 2e10)))
        stood_still = "" if event.seconds is None else f"{event.seconds:.3g} s"
        rows.append([when, str(event.step), event.event, stood_still, event.text])
    columns = ["time (UTC)", "after step", "event", "stood still", "what happened"]
    return Table(f"Events{left_out}", columns, rows)


def _plain(values: dict[str, Any]) -> dict[str, str]:
    """Return values as texts, without values that are unknown or empty."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
        if value is not None
    }


def _machine_facts(view: View) -> dict[str, str]:
    last = view.run.last
    provenance = last.get("provenance") or {}
    found = {"recorded": provenance.get("when"), **provenance.get("versions", {}), **provenance.get("machine", {})}
    found |= {f"{name} commit": value for name, value in provenance.get("commits", {}).items()}
    for name in ("backend", "global_batch_size", "num_parameters", "gradient_bytes", "workers", "num_restarts"):
        found[name.replace("_", " ")] = last.get(name)
    found |= {f"rank {rank}": f"{each.device} on {each.host}" for rank, each in sorted(view.run.ranks.items())}
    return _plain(found)


# The plots: where the time of a step goes, curves over the steps, the timeline. None contains text from a record.

# Ranks that a drawing shows; the tables have all.
MOST_ROWS = 16

MOST_POINTS = 240


def draw(view: View, baseline: BaselineComparison | None = None) -> list[str]:
    """Return the drawings for which there are figures."""
    plots = [
        _parts(view),
        _curve(view, None, "Throughput", "samples per second", _rate),
        _curve(view, baseline, "Loss", "loss of the global batch", lambda step: step.loss),
        _curve(view, None, "Learning rate", "learning rate", lambda step: step.learning_rate),
        _curve(view, None, "Gradient norm", "before clipping", lambda step: step.grad_norm),
    ]
    return [plot for plot in plots if plot is not None]


def _rate(step: StepLine) -> float:
    return step.samples / step.lasted_s if step.lasted_s else math.nan


def shown_ranks(view: View, most: int = MOST_ROWS) -> list[int]:
    """Return the ranks that a drawing shows: all, or if there are many, those that others wait for most."""
    last_share = view.figures.last_share if view.figures is not None else {}
    return sorted(sorted(view.run.ranks, key=lambda rank: (-last_share.get(rank, 0.0), rank))[:most])


def _parts(view: View) -> str | None:
    if view.figures is None:
        return None
    rows = {f"rank {rank}": by_words(view.figures.by_rank[rank]) for rank in shown_ranks(view)}
    note = ""
    if len(rows) > 1:
        rows = {"critical": by_words(view.figures.critical), **rows}
        note = "The bar on top is the work that the others waited for: what shortens it shortens the step."
    return drawing.stacked_bars("Where the time of a step goes", "milliseconds per step, mean", rows, note)


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points: the means of bins."""
    # Means instead of every n-th point, so that a slow step in between stays visible.
    size = math.ceil(len(points) / MOST_POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]


def _curve(
    view: View, baseline: BaselineComparison | None, heading: str, label: str, read: Callable[[StepLine], float | None]
) -> str | None:
    """Draw a figure over the steps, and the baseline's if there is one; None if it never changed."""
    views = {"this run": view} if baseline is None else {"this run": view, baseline.name: baseline.view}
    figure, axes = drawing.make_axes(2.8 if heading == "Loss" else 2.0, grid="y")
    words = []
    looks = ((drawing.BLUE, "-"), (drawing.VERMILION, "--"))
    for (name, each), (colour, dashes) in zip(views.items(), looks, strict=False):
        points = [(step.step + 1.0, value) for step in each.run.zero.steps if (value := read(step)) is not None]
        known = [value for _, value in points if math.isfinite(value)]
        if not known or (min(known) == max(known) and heading != "Loss"):
            continue
        axes.plot(*zip(*_binned(points), strict=True), color=colour, linestyle=dashes, linewidth=1.8, label=name)
        text = f"from {points[0][1]:.3g} to {points[-1][1]:.3g}, between {min(known):.3g} and {max(known):.3g}"
        words.append(f"{name}: {text}" if len(views) > 1 else text)
    if not words:
        return None
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    if len(words) > 1:
        axes.legend()
    alt = f"Curve of the {heading.lower()} over the steps: {'; '.join(words)}."
    return drawing.finish_plot(heading, alt, figure, baseline.loss_note if baseline is not None else "")


# The timeline as a drawing: a lane for each rank, with its phases above and its buckets below.

PHASES = {
    "data_wait": ("data wait", drawing.PURPLE),
    "forward": ("forward", drawing.SKY),
    "backward": ("backward", drawing.BLUE),
    "waiting": ("waits for gradients", drawing.VERMILION),
    "optimizer": ("optimizer", drawing.GREEN),
}

NOTE = (
    "What each rank did when. Hatched is waiting; the thin lines below a bar are buckets of gradients, from ready over "
    "sent to reduced."
)

_INCHES_WIDE = 9.6
_MOST_RANKS = 8


def draw_timeline(view: View) -> str | None:
    """Return the drawing; None if no step has a timeline of every rank."""
    if not view.window:
        return None
    ranks = shown_ranks(view, _MOST_RANKS)
    zero = min(timelines[0].time for timelines in view.window.values())
    figure, axes = drawing.make_axes(1.5 + 0.62 * len(ranks), grid="x", inches_wide=_INCHES_WIDE)
    for row, rank in enumerate(ranks):
        for timeline in view.window[rank]:
            for phase, begin_s, end_s in bars_of(timeline, zero):
                label, colour = PHASES[phase]
                look = {"hatch": "////" if phase == "waiting" else "", "edgecolor": drawing.TEXT, "linewidth": 0.4}
                axes.barh(row - 0.17, (end_s - begin_s) * 1e3, 0.42, begin_s * 1e3, color=colour, label=label, **look)
            for bucket in timeline.buckets:
                # Three levels in turn, since consecutive buckets overlap in time.
                levels = [row + 0.1 + 0.09 * (bucket.number % 3)] * 2
                moments = (bucket.ready_s, bucket.sent_s, bucket.done_s)
                ready_ms, sent_ms, done_ms = ((timeline.time - zero + moment) * 1e3 for moment in moments)
                axes.plot([ready_ms, sent_ms], levels, color=drawing.TEXT, linewidth=1.0, linestyle=":")
                axes.plot([sent_ms, done_ms], levels, color=drawing.VERMILION, linewidth=2.4, label="bucket on its way")
    drawing.label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.set_xlabel("milliseconds")
    drawing.legend_above(axes, 4, -0.01)
    numbers = [timeline.step + 1 for timeline in view.window[ranks[0]]]
    steps = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    return drawing.finish_plot(f"Timeline of {steps}", f"What each rank did when, in {steps}, as bars.", figure, NOTE)
