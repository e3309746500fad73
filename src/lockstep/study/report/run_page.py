"""The page of a run: verdict, advice, plots and tables in one HTML file, every text from a record escaped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean, median
from typing import Any

from lockstep.study.drawing import STYLE, drawing_style, figure, import_matplotlib
from lockstep.study.report.plots import LOADS, MIB, PART_COLOURS, bus_bytes_per_s, draw, draw_timeline, memory_of
from lockstep.study.report.view import BaselineComparison, View, sentences, setting_values

OWN_STYLE = """
.gaps { border-left: .25rem solid #D55E00; padding: .25rem 1rem; background: var(--card); }
.gaps ul, .advice { margin: .25rem 0; padding-left: 1.25rem; }
.advice li { margin: .3rem 0; }
.verdict > li:nth-child(3) { border-left: .25rem solid #0072B2; padding-left: .75rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
@media (max-width: 30rem) { figure { padding: .75rem .5rem; } figcaption, .note { padding: 0 .25rem; } }
.timeline { margin-top: 1rem; }
.timeline .scroll { overflow-x: auto; }
.timeline svg { max-width: none; min-width: 44rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); }
summary:focus-visible, .scroll:focus-visible { outline: 2px solid #0072B2; outline-offset: 2px; }
table caption { text-align: left; color: var(--soft); padding: .25rem 0; }
td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
tr.differs th, tr.differs td { font-weight: 600; }
.skip { position: absolute; left: -100rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--card); padding: .25rem .5rem; }
@media print { details > * { display: block; } }
"""

_MOST_ADVICE = 6


def render(view: View, baseline: BaselineComparison | None = None) -> str:
    """Return the page of a run, maybe with another that it is compared with.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    import_matplotlib(otherwise="")
    with drawing_style(11.0):  # on a phone they are scaled down
        plots, timeline = draw(view, baseline), draw_timeline(view)
    drawings = "\n".join(figure(plot) for plot in plots)
    lanes = "" if timeline is None else _timeline(figure(timeline))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(view.task)}: lockstep report</title>
<style>{STYLE}{OWN_STYLE}</style>
</head>
<body>
<a class="skip" href="#figures">To the figures</a>
<main>
<h1>{escape(view.task)}</h1>
<p class="soft">{escape(_subtitle(view))}</p>
<ul class="verdict">{_items(sentences(view, baseline))}</ul>
{_gaps(view)}
{_advice(view)}
<h2 id="figures">Figures</h2>
<div class="plots">
{drawings}
</div>
{lanes}
{"".join(_fold(table) for table in figure_tables(view))}
<h2>The run</h2>
{"".join(_fold(table) for table in about_tables(view, baseline))}
{_commands(view)}
<footer>
<p>Made by lockstep report. Times are means over the steps that all ranks recorded, without the first few and
without spikes. Exchange is what the rank that came last waited for gradients; what others waited longer, they waited
for it. {escape(_clocks(view))}</p>
</footer>
</main>
</body>
</html>
"""


def _subtitle(view: View) -> str:
    settings = view.run.last.get("settings")
    strategy = settings.get("strategy") if isinstance(settings, dict) else None
    hosts = len({record.host for record in view.run.ranks.values()})
    parts = [
        str(view.run.folder),
        f"strategy {strategy}" if strategy else "",
        f"{len(view.run.ranks)} rank{'s' * (len(view.run.ranks) != 1)} on {hosts} host{'s' * (hosts != 1)}",
        f"global batch {view.run.last['global_batch_size']}" if "global_batch_size" in view.run.last else "",
        f"{len(view.run.sessions)} starts" if len(view.run.sessions) > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _gaps(view: View) -> str:
    if not view.run.gaps:
        return ""
    heading = "What is missing in this record"
    return f'<section class="gaps"><strong>{heading}</strong><ul>{_items(view.run.gaps)}</ul></section>'


def _advice(view: View) -> str:
    if not view.advice:
        return ""
    how = "The largest gain first, what makes it another training run last. Each on its own, predicted from what was "
    items = _items([advice.text for advice in view.advice[:_MOST_ADVICE]])
    return f'<h2>What to change</h2><p class="soft">{how}measured here.</p><ol class="advice">{items}</ol>'


def _timeline(text: str) -> str:
    text = text.replace('<div role="img"', '<div class="scroll" tabindex="0" role="img"', 1)
    return text.replace("<figure>", '<figure class="timeline">', 1)


def _fold(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = []
    for row in table.rows:
        kind = ' class="text"' if table.is_text else ""
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row[1:])
        differs = ' class="differs"' if row[0] in table.differs else ""
        rows.append(f'<tr{differs}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    return (
        f"<details><summary>{escape(table.heading)}</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.heading)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>\n"
    )


def _commands(view: View) -> str:
    session = view.run.last
    command, folder = session.get("command"), session.get("working_directory")
    if not isinstance(command, str):
        return ""
    lines = [f"cd {folder}"] if isinstance(folder, str) else []
    text = "<br>".join(f"<code>{escape(line)}</code>" for line in (*lines, command))
    return f"<h3>To repeat it</h3><p>{text}</p>"


def _clocks(view: View) -> str:
    error_s = view.run.clock_error_s
    if error_s == 0:
        return "All ranks read the same clock."
    return f"The ranks' clocks were aligned to within {error_s * 1e6:,.0f} microseconds."


# All figures as tables: for those who do not see the drawings, and for what drawings leave out.

_MOST_EVENTS = 200


@dataclass(frozen=True)
class Table:
    """A table under a heading; the rows named in ``differs`` are those in which two runs are not alike."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False
    differs: frozenset[str] = field(default_factory=frozenset)


def figure_tables(view: View) -> list[Table]:
    """Return the tables of what was measured."""
    return [*_parts_tables(view), *_spread(view), *_buckets(view), *_events(view)]


def about_tables(view: View, baseline: BaselineComparison | None) -> list[Table]:
    """Return the tables of what was run, and where; with a baseline its column beside, and what differs marked."""
    views = [view] if baseline is None else [view, baseline.view]
    columns = ["", "this run", *([] if baseline is None else [baseline.name])]
    found = []
    for heading, facts in (
        ("Settings", [_plain(setting_values(each.run.last)) for each in views]),
        ("Machine and versions", [_machine_facts(each) for each in views]),
        ("Ranks", [_ranks(each) for each in views]),
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
    return [Table("Milliseconds per step, by rank", columns, [*rows, ["critical path", *whole]])]


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
    return [Table("Each figure over the ranks", ["", "least", "median", "most"], rows)] if rows else []


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
    heading = "Buckets of gradients on their way"
    return [Table(heading, ["bucket", "MiB", "best ms", "median ms", "slowest ms", "bus GB/s"], rows)]


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
    return [Table(f"Events{left_out}", columns, rows, is_text=True)]


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
