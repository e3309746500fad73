"""One self-contained page of a run: what was to be shown and what was, drawings, and all figures."""

from collections.abc import Sequence
from html import escape

from bench.report.goals import judge
from bench.report.plots import draw
from bench.report.run import Run, models, rounds
from lockstep.study.common import Spread, paired_ratio
from lockstep.study.drawing import STYLE

OWN_STYLE = """
figure p { margin: .4rem 0 0; font-size: .85rem; color: var(--soft); }
.yes { color: #009E73; } .no { color: #D55E00; font-weight: 600; }
td.words { text-align: left; white-space: normal; }
"""


def render(run: Run) -> str:
    """Return the page."""
    provenance = run["provenance"]
    facts = {"measured": provenance["when"], **provenance["versions"], **provenance["machine"]}
    facts |= {f"{name} commit": commit[:13] for name, commit in provenance["commits"].items()}
    told = " &middot; ".join(f"{escape(name)} {escape(value)}" for name, value in facts.items())
    quick = "<p><strong>A quick run, to see that everything works: its figures mean nothing.</strong></p>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Lockstep: the benchmark</title>
<style>{STYLE}{OWN_STYLE}</style>
</head>
<body>
<main>
<h1>Lockstep: the benchmark</h1>
<p class="soft">All contenders in one session, interleaved; medians with the range that holds the true median with 90%
certainty. docs/speed.md says how it is measured, bench/contenders.py what the contenders are.</p>
{quick if run["quick"] else ""}
<h2>What was to be shown</h2>
{verdict(run)}
<h2>Drawings</h2>
<div class="plots">
{"".join(figure(drawing.heading, drawing.caption, drawing.svg()) for drawing in draw(run))}
</div>
<h2>Steps of two ranks, AdamW as it comes (ms)</h2>
{steps(run, "steps")}
<h2>Steps of two ranks, AdamW(fused=True), larger models (ms)</h2>
{steps(run, "steps_fused")}
<footer>
<p><code>{escape(run["command"])}</code>, {run["seconds"] / 60:.0f} minutes</p>
<p>{told}</p>
</footer>
</main>
</body>
</html>
"""


def verdict(run: Run) -> str:
    rows = []
    for judgement in judge(run):
        mark = {True: "yes", False: "no", None: "soft"}[judgement.reached]
        cells = (judgement.text, judgement.limit, judgement.measured, f'<span class="{mark}">{judgement.word}</span>')
        rows.append([escape(cell) for cell in cells[:3]] + [cells[3]])
    return table(("ratio", "goal", "measured", ""), rows)


def steps(run: Run, part: str) -> str:
    rows = []
    for name in models(run, part):
        seconds = rounds(run, part, "models", name)
        for contender, values in seconds.items():
            cells = [spread_text(Spread.of([value * 1e3 for value in values]), 2)]
            cells += [spread_text(paired_ratio(values, seconds[other]), 3) for other in ("none", "torch")]
            rows.append([escape(f"{name}: {contender}"), *cells])
    rows += [
        [escape(name), escape(reason), "", ""] for name, reason in run["parts"].get(part, {}).get("missing", {}).items()
    ]
    return table(("", "ms", "over no synchronisation", "over torch DDP"), rows)


def spread_text(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def figure(heading: str, caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(heading)}</figcaption>{svg}<p>{escape(caption)}</p></figure>\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )
