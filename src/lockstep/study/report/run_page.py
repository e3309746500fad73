"""The page of a run: verdict, advice, plots and tables in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.study.drawing import STYLE, drawing_style, figure, import_matplotlib
from lockstep.study.report import tables
from lockstep.study.report.plots import draw_timeline
from lockstep.study.report.tables import Table, draw
from lockstep.study.report.view import BaselineComparison, View, against, sentences

OWN_STYLE = """
.gaps { border-left: .25rem solid #D55E00; padding: .25rem 1rem; background: var(--card); }
.gaps ul, .advice { margin: .25rem 0; padding-left: 1.25rem; }
.advice li { margin: .3rem 0; }
.verdict.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
.verdict.two > li { font-size: 1rem; font-weight: 400; }
.verdict ul { padding: 0; list-style: none; }
.verdict li ul li:first-child { font-size: 1.1rem; }
.verdict > li:nth-child(3), .verdict li ul li:nth-child(3) { border-left: .25rem solid #0072B2; padding-left: .75rem; }
.side-by-side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
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


def render(views: Sequence[View], beside: BaselineComparison | None = None) -> str:
    """Return the page; with one run, another may be ``beside`` it.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    import_matplotlib(otherwise="")
    with drawing_style(11.0):  # on a phone they are scaled down
        plots = draw(views, beside)
        timelines = [plot for plot in map(draw_timeline, views) if plot is not None]
    drawings = "\n".join(figure(plot) for plot in plots)
    lanes = "\n".join(_timeline(figure(plot)) for plot in timelines)
    about = " and ".join(dict.fromkeys(view.task for view in views))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(about)}: lockstep report</title>
<style>{STYLE}{OWN_STYLE}</style>
</head>
<body>
<a class="skip" href="#figures">To the figures</a>
<main>
<h1>{escape(about)}</h1>
{"".join(f'<p class="soft">{escape(_subtitle(view))}</p>' for view in views)}
{_verdict(views, beside)}
{"".join(_gaps(view) for view in views)}
{_advice(views)}
<h2 id="figures">Figures</h2>
<div class="plots">
{drawings}
</div>
{lanes}
{"".join(_fold(table) for table in tables.figures(views))}
<h2>The run</h2>
{"".join(_fold(table) for table in tables.about(views))}
{"".join(_commands(view) for view in views)}
<footer>
<p>Made by lockstep report. Times are means over the steps that all ranks recorded, without the first few and
without spikes. Exchange is what the rank that came last waited for gradients; what others waited longer, they waited
for it. {escape(_clocks(views))}</p>
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
    return view.named(", ".join(part for part in parts if part))


def _verdict(views: Sequence[View], beside: BaselineComparison | None) -> str:
    if len(views) == 1:
        return f'<ul class="verdict">{_items(sentences(views[0], beside))}</ul>'
    columns = "".join(f"<li><strong>{view.label}</strong><ul>{_items(sentences(view))}</ul></li>" for view in views)
    whole = f'<ul class="verdict"><li>{escape(against(views[0], views[1]))}</li></ul>'
    return f'{whole}<ul class="verdict two">{columns}</ul>'


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _gaps(view: View) -> str:
    if not view.run.gaps:
        return ""
    heading = escape(view.named("What is missing in this record"))
    return f'<section class="gaps"><strong>{heading}</strong><ul>{_items(view.run.gaps)}</ul></section>'


def _advice(views: Sequence[View]) -> str:
    lists = [
        f"<div>{f'<h3>{view.label}</h3>' if view.label else ''}"
        f'<ol class="advice">{_items([advice.text for advice in view.advice[:_MOST_ADVICE]])}</ol></div>'
        for view in views
        if view.advice
    ]
    if not lists:
        return ""
    how = "The largest gain first, what makes it another training run last. Each on its own, predicted from what was "
    return (
        f'<h2>What to change</h2><p class="soft">{how}measured here.</p>'
        f'<div class="side-by-side">{"".join(lists)}</div>'
    )


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
    return f"<h3>{escape(view.named('To repeat it'))}</h3><p>{text}</p>"


def _clocks(views: Sequence[View]) -> str:
    error_s = max(view.run.clock_error_s for view in views)
    if error_s == 0:
        return "All ranks read the same clock."
    return f"The ranks' clocks were aligned to within {error_s * 1e6:,.0f} microseconds."
