"""How the pages look, and the parts that they share."""

from html import escape

from lockstep.study.drawing import Plot

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
.note { margin: 0 0 .5rem; font-size: .9rem; color: var(--soft); }
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


def figure(plot: Plot) -> str:
    """Return a drawing with its heading and its note, and its words for those who do not see it."""
    note = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    return (
        f"<figure><figcaption>{escape(plot.heading)}</figcaption>{note}"
        f'<div role="img" aria-label="{escape(plot.alt)}">{plot.svg}</div></figure>'
    )
