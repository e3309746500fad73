"""One self-contained HTML page: the verdict, the plots and the tables, for desktop and phone, light and dark."""

from html import escape

from lockstep.study.compare import table
from lockstep.study.compare.figures import Comparison
from lockstep.study.compare.plots import draw
from lockstep.study.compare.verdict import Verdict
from lockstep.study.html import STYLE, figure
from lockstep.telemetry.provenance import Provenance


def render(comparison: Comparison, verdict: Verdict, provenance: Provenance) -> str:
    """Return the page.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    setup = comparison.setup
    left_out = [f"{left.strategy} was left out: {left.reason}" for left in comparison.left_out]
    notes = [f'<p class="soft">{escape(note)}</p>' for note in (*table.footnotes(comparison), *left_out)]
    sentences = [f"<li>{escape(sentence)}</li>" for sentence in verdict.sentences]
    facts = " &middot; ".join(f"{escape(name)} {escape(text)}" for name, text in provenance.facts())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(setup.task)} on {setup.num_devices} {escape(setup.device)}: lockstep compare</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(setup.task)} on one device{f" and on {setup.num_devices}" if setup.num_devices > 1 else ""}</h1>
<p class="soft">{escape(table.title(comparison))}</p>
<ul class="verdict">
{chr(10).join(sentences)}
</ul>
<div class="plots">
{chr(10).join(figure(plot) for plot in draw(comparison))}
</div>
<h2>Figures</h2>
{_table(comparison, table.SUMMARY)}
<h2>Time per step (ms)</h2>
{_table(comparison, table.STEP)}
{chr(10).join(notes)}
<footer>
<p><code>{escape(setup.command)}</code></p>
<p>{facts}</p>
</footer>
</main>
</body>
</html>
"""


def _table(comparison: Comparison, columns: tuple[str, ...]) -> str:
    heading = "".join(f'<th scope="col">{escape(column)}</th>' for column in ("strategy", *columns))
    rows = []
    for contender in comparison.contenders:
        texts = table.cells(comparison, contender)
        cells = "".join(f"<td>{escape(texts[column])}</td>" for column in columns)
        rows.append(f'<tr><th scope="row">{escape(contender.strategy)}</th>{cells}</tr>')
    body = "\n".join(rows)
    head = f"<thead><tr>{heading}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>\n{body}\n</tbody></table></div>'
