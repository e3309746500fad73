"""The style of the pages: matplotlib's SVG in the page's colours, tables, the style sheet, and the page itself."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Literal

from lockstep.study.common import Table
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.step_times import PARTS, Part

# Okabe and Ito's palette: distinguishable with every common form of colour blindness, on light and dark backgrounds.
BLUE, GREEN, VERMILION = "#0072B2", "#009E73", "#D55E00"


def fill(name: str, markup: Mapping[str, str]) -> str:
    """Return a file of this package, with ``markup`` in the places that it names."""
    return Template(files("lockstep.study").joinpath(name).read_text()).substitute(markup)


# Of all pages, which contain it.
STYLE = fill("page.css", {})

# Placeholders that no plot uses otherwise. In the SVG they are replaced by the page's colours for light and dark mode.
TEXT, GRID = "#010203", "#040506"

# Narrow, so that letters keep their size on a phone.
INCHES_WIDE = 4.8


@contextmanager
def drawing_style(font_size: float = 10.0) -> Iterator[None]:
    """Set the style of figures for the pages inside the block; ``font_size`` is in points."""
    from matplotlib import rc_context

    # In a context, because the caller, such as a notebook, may draw in another style.
    style: Any = {
        "svg.fonttype": "none",  # text stays text: it has the page's font, and can be searched
        "font.size": font_size,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
        "grid.linewidth": 0.6,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "axes.axisbelow": True,
        "legend.columnspacing": 1.0,
        "legend.handlelength": 1.4,
    }
    with rc_context(style):
        yield


def make_axes(inches_high: float, *, grid: Literal["x", "y"]) -> tuple[Any, Any]:
    """Return a figure and its axes, with grid lines of the axis ``grid``."""
    from matplotlib.figure import Figure

    # Not pyplot: it keeps figures alive, and may search for a display.
    figure = Figure(figsize=(INCHES_WIDE, inches_high), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis=grid)
    return figure, axes


def label_rows(axes: Any, labels: Sequence[str], label: str) -> None:
    """Label horizontal bars, from the top, and their axis; the legend is above them."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    # Each label once.
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), ncols=3, loc="lower left", bbox_to_anchor=(-0.18, 1.0))


def draw_bar(axes: Any, place: float, part: Part, begin_s: float, end_s: float, *, height: float) -> None:
    """Draw a part of a step as a horizontal bar in milliseconds."""
    # With a thin edge: light colours alone are hard to see on a light background.
    look = {"color": part.color, "hatch": part.hatch, "edgecolor": TEXT, "linewidth": 0.5, "height": height}
    axes.barh(place, (end_s - begin_s) * 1e3, left=begin_s * 1e3, label=part.label, **look)


def stacked_bars(heading: str, label: str, rows: Mapping[str, Mapping[str, float]], note: str = "") -> str:
    """Draw a stacked bar in milliseconds for each row.

    Args:
        heading: Of the drawing.
        label: Of the axis.
        rows: By name of the bar, the seconds of each of its `PARTS`, by name.
        note: A visible note.
    """
    figure, axes = make_axes(1.4 + 0.36 * len(rows), grid="x")
    words = []
    for place, (name, parts) in enumerate(rows.items()):
        left = 0.0
        for part, seconds in parts.items():
            draw_bar(axes, place, PARTS[part], left, left + seconds, height=0.62)
            left += seconds
        listed = ", ".join(f"{PARTS[part].label} {seconds * 1e3:.2f}" for part, seconds in parts.items())
        words.append(f"{name} {left * 1e3:.2f} ({listed})")
    label_rows(axes, list(rows), label)
    return finish_plot(heading, f"Stacked bars of milliseconds per step: {'; '.join(words)}.", figure, note)


def finish_plot(heading: str, alt: str, figure: Any, note: str = "") -> str:
    """Return a figure as HTML, with ``alt`` for screen readers and a visible ``note``; headings must be unique."""
    from matplotlib import rc_context

    stream = io.StringIO()
    # Ids in the drawings are derived from the salt. Drawings on the same page must not have the same ids.
    with rc_context({"svg.hashsalt": heading}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    for pattern, instead in _SVG_EDITS.items():
        svg = re.sub(pattern, instead, svg, flags=re.DOTALL)
    # In tags, a hundredth of a point is precise enough; the text between tags is not changed.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d{3,}", r"\1", tag[0]), svg)
    svg = svg.replace(TEXT, "currentColor").replace(GRID, "var(--line)")
    shown = f'<p class="note">{escape(note)}</p>' if note else ""
    drawn = f'<div role="img" aria-label="{escape(alt)}">{svg}</div>'
    return f"<figure><figcaption>{escape(heading)}</figcaption>{shown}{drawn}</figure>"


_SVG_EDITS = {
    r"^.*?<svg": '<svg aria-hidden="true"',  # `figure` has the text
    r"<metadata>.*?</metadata>": "",
    r'<g id="[^"]*"': "<g",  # the same ids would be in every drawing
    r"font-family: [^;]*; ?": "",  # the page sets it once; these would be half of its size
    r' xmlns(:xlink)?="[^"]*"': "",  # not needed in HTML
    r'^(<svg[^>]*?) (?:width|height)="[^"]*"([^>]*?) (?:width|height)="[^"]*"': r"\1\2",
}


def html_table(table: Table) -> str:
    """Return a table without its title; it scrolls on narrow screens."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    looks = ["" if column in table.numbers else ' class="text"' for column in table.columns[1:]]
    rows = []
    for first, *others in ([str(cell) for cell in row] for row in table.rows):
        cells = "".join(f"<td{look}>{escape(cell)}</td>" for look, cell in zip(looks, others, strict=True))
        differs = ' class="differs"' if first in table.differs else ""
        rows.append(f'<tr{differs}><th scope="row">{escape(first)}</th>{cells}</tr>')
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    region = f'tabindex="0" role="region" aria-label="{escape(table.title)}"'
    return f'<div class="scroll" {region}><table>{body}</table></div>'


def items(texts: Sequence[str]) -> str:
    """Return texts as the items of a list."""
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def figures_body(plot: str, tables: Sequence[Table], notes: Sequence[str], command: str, provenance: Provenance) -> str:
    """Return the body of a page: a plot, tables (the first without a title), notes, and the provenance."""
    first, *others = tables
    shown = html_table(first) + "".join(f"\n<h2>{escape(each.title)}</h2>\n{html_table(each)}" for each in others)
    below = "\n".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
    facts = " &middot; ".join(f"{escape(name)} {escape(text)}" for name, text in provenance.facts())
    made = f"<footer>\n<p><code>{escape(command)}</code></p>\n<p>{facts}</p>\n</footer>"
    return f'<div class="plots">\n{plot}\n</div>\n<h2 id="figures">Figures</h2>\n{shown}\n{below}\n{made}'


def html_page(title: str, heading: str, subtitle: str, verdict: Sequence[str], body: str) -> str:
    """Return one self-contained page for desktop and phone, light and dark; only ``body`` is markup."""
    texts = {"title": title, "heading": heading, "subtitle": subtitle}
    markup = {"verdict": items(verdict), "style": STYLE, "body": body}
    return fill("page.html", {name: escape(text) for name, text in texts.items()} | markup)
