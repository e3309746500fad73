"""The look of the pages: matplotlib's SVG in the page's own colours, the style sheet, and a figure with its caption."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigurationError

# Drawings for a page: matplotlib's SVG that follows the page's text colour, light or dark.

# Okabe and Ito's palette, told apart with every common form of colour blindness and on light and dark ground.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
BROWN = "#8C5E2A"
GREY = "#999999"

# Stand-ins that no plot uses otherwise; in the SVG they become the page's own colours.
TEXT, GRID = "#010203", "#040506"

INCHES_WIDE = 4.8
"""Narrow, so that a phone need not shrink the letters."""


@dataclass(frozen=True)
class Plot:
    """A drawing, its heading, what it shows in words for those who do not see it, and what all should read."""

    heading: str
    alt: str
    svg: str
    note: str = ""


def import_matplotlib(otherwise: str = ", or leave --html out") -> ModuleType:
    """Return matplotlib.

    Args:
        otherwise: What else can be done where it is not installed, in words.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(
            "The page needs matplotlib, which is not installed.\n"
            f'Install it with: pip install "lockstep-torch[plots]"{otherwise}.'
        ) from error
    return matplotlib


@contextmanager
def drawing_style(font_size: float = 10.0) -> Iterator[None]:
    """Within, figures look as the pages want them, with letters of that size in points.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    style: dict[str, Any] = {
        "svg.fonttype": "none",  # text stays text: the page's font, and found by a search
        "font.size": font_size,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": GRID,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "grid.color": GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(style):
        yield


def make_axes(inches_high: float, inches_wide: float = INCHES_WIDE) -> tuple[Any, Any]:
    """Return a figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches_wide, inches_high), layout="constrained")
    return figure, figure.add_subplot()


def make_bars(num_rows: int, legend_rows: int = 0) -> tuple[Any, Any]:
    """Return a figure and its axes for horizontal bars."""
    figure, axes = make_axes(0.8 + 0.36 * num_rows + 0.2 * legend_rows)
    axes.grid(axis="x", linewidth=0.6)
    return figure, axes


def label_rows(axes: Any, labels: list[str]) -> None:
    """Name horizontal bars, from the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def finish_plot(heading: str, alt: str, figure: Any, note: str = "") -> Plot:
    """Return a figure as SVG; headings on a page differ, and a ``note`` is for all to read."""
    # Names within the drawings derive from this: several share the page, and may not share names.
    with import_matplotlib().rc_context({"svg.hashsalt": heading}):
        return Plot(heading, alt, _svg(figure), note)


def _svg(figure: Any) -> str:
    """Return the SVG element alone, its stand-in colours replaced and its group names dropped, as they would repeat."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font-family: [^;]*; ?", "", svg)  # the page has one for all, and they would be half of it
    svg = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d{3,}", r"\1", tag[0]), svg
    )  # a hundredth of a point will do
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)  # within HTML they are known
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    return svg.replace(TEXT, "currentColor").replace(GRID, "var(--line)").replace("<svg", '<svg aria-hidden="true"', 1)


# How the pages look, and the parts that they share.

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
