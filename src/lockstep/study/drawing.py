"""The style of the pages: plots that plotly draws in the page's colours, tables, the style sheet, and the page."""

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from lockstep.study.common import Table
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.step_times import PARTS, Part

# Okabe and Ito's palette: distinguishable with every common form of colour blindness, on light and dark backgrounds.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#999999"

# A trace or a layout of plotly: https://plotly.com/javascript/reference.
Attributes = dict[str, Any]


def fill(name: str, markup: Mapping[str, str]) -> str:
    """Return a file of this package, with ``markup`` in the places that it names."""
    return Template(files("lockstep.study").joinpath(name).read_text()).substitute(markup)


# Of all pages, which contain it.
STYLE = fill("page.css", {})


@cache
def _plotly() -> str:
    """Return plotly's script for a page that works offline: 2 MB, and 5 MB if it was not compressed."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def plain(text: str) -> str:
    """Return a text for a trace or a layout, in which plotly would interpret tags."""
    return escape(text, quote=False)


def bars(part: Part, bars_s: Sequence[tuple[float | str, float, float]], *, height: float = 0.62) -> Attributes:
    """Return the bars of a part of a step: of each the place on the y axis, the begin, and the duration in seconds."""
    places, begins_s, lasts_s = zip(*bars_s, strict=True)
    return {
        "type": "bar",
        "orientation": "h",
        "name": part.label,
        "y": places,
        # Bars that have a base are not stacked.
        **({"base": [round(begin_s * 1e3, 3) for begin_s in begins_s]} if any(begins_s) else {}),
        "x": [round(seconds * 1e3, 3) for seconds in lasts_s],
        "width": height,
        "marker": {"color": part.color, "pattern": {"shape": part.hatch, "fillmode": "overlay", "size": 6}},
        "hovertext": [f"{seconds * 1e3:.2f} ms" for seconds in lasts_s],  # x would be the end
        "hovertemplate": "%{hovertext}",
    }


def stacked_bars(heading: str, label: str, rows: Mapping[str, Mapping[str, float]], note: str = "") -> str:
    """Plot a stacked bar in milliseconds for each row.

    Args:
        heading: Of the plot.
        label: Of the axis.
        rows: By name of the bar, the seconds of each of its `PARTS`, by name.
        note: A visible note.
    """
    words = []
    for name, parts in rows.items():
        listed = ", ".join(f"{PARTS[part].label} {seconds * 1e3:.2f}" for part, seconds in parts.items())
        words.append(f"{name} {sum(parts.values()) * 1e3:.2f} ({listed})")
    by_part = {part: [(plain(name), 0.0, row[part]) for name, row in rows.items() if part in row] for part in PARTS}
    traces = [bars(PARTS[part], part_bars) for part, part_bars in by_part.items() if part_bars]
    alt = f"Stacked bars of milliseconds per step: {'; '.join(words)}."
    return plot(heading, alt, traces, bars_layout(label, len(rows), {"autorange": "reversed"}), note)


def bars_layout(label: str, num_rows: int, y_axis: Attributes) -> Attributes:
    """Return the layout of horizontal bars, with the label of their axis, and what else is set of the other."""
    return {
        "barmode": "stack",
        "hovermode": "closest",
        "height": 90 + 34 * num_rows,
        "xaxis": {"title": {"text": label}},
        "yaxis": {"showgrid": False, "fixedrange": True, **y_axis},
    }


def plot(heading: str, alt: str, traces: Sequence[Attributes], layout: Attributes, note: str = "") -> str:
    """Return a figure as HTML, which the script of the page draws.

    Args:
        heading: Of the figure.
        alt: What it shows, for screen readers.
        traces: Of plotly; texts must be `plain`.
        layout: Of plotly; bars get the whole width of the page.
        note: A visible note.
    """
    # JSON in a script must not end it.
    data = json.dumps({"data": traces, "layout": layout}, separators=(",", ":")).replace("<", "\\u003c")
    note_html = f'<p class="note">{escape(note)}</p>' if note else ""
    drawn = f'<div class="plot" role="img" aria-label="{escape(alt)}" style="height: {layout["height"]}px"></div>'
    css = ' class="wide"' if "barmode" in layout else ""
    text = f"<figcaption>{escape(heading)}</figcaption>{note_html}{drawn}"
    return f'<figure{css}>{text}<script type="application/json">{data}</script></figure>'


def html_table(table: Table) -> str:
    """Return a table without its title; it scrolls on narrow screens."""
    classes = ["" if column in table.numbers else ' class="text"' for column in table.columns]
    head = "".join(
        f'<th scope="col"{css}>{escape(name)}</th>' for css, name in zip(classes, table.columns, strict=True)
    )
    rows = []
    for label, *values in ([str(cell) for cell in row] for row in table.rows):
        cells = "".join(f"<td{css}>{escape(cell)}</td>" for css, cell in zip(classes[1:], values, strict=True))
        differs = ' class="differs"' if label in table.differs else ""
        rows.append(f'<tr{differs}><th scope="row">{escape(label)}</th>{cells}</tr>')
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    region = f'tabindex="0" role="region" aria-label="{escape(table.title)}"'
    return f'<div class="scroll" {region}><table>{body}</table></div>'


def items(texts: Sequence[str]) -> str:
    """Return texts as the items of a list, in which no line ends within a number such as ``5e-08``."""
    html = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return re.sub(r"[\d.]+e-\d+", r'<span class="number">\g<0></span>', html)


def figures_body(plot: str, tables: Sequence[Table], notes: Sequence[str], command: str, provenance: Provenance) -> str:
    """Return the body of a page: a plot, tables (the first without a title), notes, and the provenance."""
    first, *others = tables
    html = html_table(first) + "".join(f"\n<h2>{escape(table.title)}</h2>\n{html_table(table)}" for table in others)
    below = "\n".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
    facts = " &middot; ".join(f"{escape(name)} {escape(text)}" for name, text in provenance.facts())
    footer = f"<footer>\n<p><code>{escape(command)}</code></p>\n<p>{facts}</p>\n</footer>"
    return f'<div class="plots">\n{plot}\n</div>\n<h2 id="figures">Figures</h2>\n{html}\n{below}\n{footer}'


def html_page(title: str, heading: str, subtitle: str, verdict: Sequence[str], body: str) -> str:
    """Return one self-contained page for desktop and phone, light and dark; only ``body`` is markup."""
    texts = {"title": title, "heading": heading, "subtitle": subtitle}
    markup = {"verdict": items(verdict), "style": STYLE, "plotly": _plotly(), "body": body}
    return fill("page.html", {name: escape(text) for name, text in texts.items()} | markup)
