"""One self-contained HTML page: the verdict, the plots and the tables, for desktop and phone, light and dark."""

from html import escape

from lockstep.monitor.provenance import Provenance
from lockstep.study.compare import table
from lockstep.study.compare.figures import Comparison
from lockstep.study.compare.plots import Plot, draw
from lockstep.study.compare.verdict import Verdict

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --text: #1c1c1e; --soft: #5c5c63; --line: #d5d5d8; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #17171a; --text: #ececee; --soft: #a3a3ab; --line: #3c3c42; --card: #1f1f23; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.soft, li.soft, footer { color: var(--soft); }
.verdict { padding: 0; list-style: none; }
.verdict li { margin: .4rem 0; }
.verdict li:first-child { font-size: 1.2rem; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem 1rem; border: 1px solid var(--line); border-radius: .5rem; }
figure { background: var(--card); }
figcaption { font-weight: 600; margin-bottom: .5rem; }
svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--ground); }
thead th { color: var(--soft); font-weight: 500; }
code { overflow-wrap: anywhere; }
footer { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: 1rem; font-size: .85rem; }
"""


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
{chr(10).join(_figure(plot) for plot in draw(comparison))}
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


def _figure(plot: Plot) -> str:
    return (
        f"<figure><figcaption>{escape(plot.heading)}</figcaption>"
        f'<div role="img" aria-label="{escape(plot.alt)}">{plot.svg}</div></figure>'
    )


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
