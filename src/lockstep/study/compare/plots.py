"""The four plots of the page, drawn by matplotlib as SVG that follows the page's text colour, light or dark."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigurationError
from lockstep.study.compare.figures import Comparison, StepTime
from lockstep.study.compare.table import MIB, number

# Okabe and Ito's palette, told apart with every common form of colour blindness and on light and dark ground.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
BROWN = "#8C5E2A"
COLOURS = {
    "single": ORANGE,
    "torch-dp": PURPLE,
    "dp": VERMILION,
    "dp-zero1": BROWN,
    "torch-ddp": SKY,
    "ddp": BLUE,
    "ddp-zero1": GREEN,
}
DASHES = {
    "single": "-",
    "torch-dp": ":",
    "dp": "-.",
    "dp-zero1": (0, (5, 1, 1, 1, 1, 1)),
    "torch-ddp": "--",
    "ddp": "-",
    "ddp-zero1": (0, (3, 1, 1, 1)),
}

# Stand-ins that no plot uses otherwise; in the SVG they become the page's own colours.
TEXT, GRID = "#010203", "#040506"

INCHES_WIDE = 4.8
"""Narrow, so that a phone need not shrink the letters."""

PARTS: tuple[tuple[str, str, Callable[[StepTime], float]], ...] = (
    ("data wait", PURPLE, lambda step: step.data_wait_s),
    ("forward", SKY, lambda step: step.forward_s),
    ("backward", BLUE, lambda step: step.backward_s),
    ("exposed comm.", VERMILION, lambda step: step.exposed_s),
    ("optimizer", GREEN, lambda step: step.optimizer_s),
    ("other", "#999999", lambda step: step.other_s),
)


@dataclass(frozen=True)
class Plot:
    """A drawing, its heading, and what it shows in words for those who do not see it."""

    heading: str
    alt: str
    svg: str


def import_matplotlib() -> ModuleType:
    """Return matplotlib.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(
            "The page needs matplotlib, which is not installed.\n"
            'Install it with: pip install "lockstep-torch[plots]", or leave --html out.'
        ) from error
    return matplotlib


def draw(comparison: Comparison) -> tuple[Plot, ...]:
    """Draw all plots.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    style = {
        "svg.fonttype": "none",  # text stays text: the page's font, and found by a search
        "font.size": 10,
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
        return (_throughput(comparison), _step(comparison), _loss(comparison), *_memory(comparison))


def _throughput(comparison: Comparison) -> Plot:
    figure, axes = _bars(len(comparison.contenders))
    words = []
    for row, contender in enumerate(comparison.contenders):
        rate = contender.rate
        reach = [[rate.median - rate.low], [rate.high - rate.median]]
        axes.barh(row, rate.median, xerr=reach, color=COLOURS[contender.strategy], ecolor=TEXT, capsize=3, height=0.6)
        axes.annotate(
            f" {number(rate.median)}", (rate.high, row), va="center", xytext=(3, 0), textcoords="offset points"
        )
        words.append(f"{contender.strategy} {number(rate.median)} ({number(rate.low)} to {number(rate.high)})")
    axes.margins(x=0.2)
    _label_rows(axes, [c.strategy for c in comparison.contenders])
    axes.set_xlabel("samples per second, with spread")
    return _plot("Throughput", f"Bars of samples per second: {'; '.join(words)}.", figure)


def _step(comparison: Comparison) -> Plot:
    figure, axes = _bars(len(comparison.contenders), legend_rows=2)
    words = []
    for row, contender in enumerate(comparison.contenders):
        step, left = contender.step, 0.0
        for label, colour, seconds in PARTS:
            width_ms = seconds(step) * 1e3
            axes.barh(row, width_ms, left=left, color=colour, height=0.6, label=label if row == 0 else None)
            left += width_ms
        parts = ", ".join(f"{label} {seconds(step) * 1e3:.2f}" for label, _, seconds in PARTS)
        words.append(f"{contender.strategy} {step.total_s * 1e3:.2f} ({parts})")
    _label_rows(axes, [c.strategy for c in comparison.contenders])
    axes.set_xlabel("milliseconds per step")
    axes.legend(
        ncols=3, loc="lower left", bbox_to_anchor=(-0.1, 1.0), frameon=False, columnspacing=1.0, handlelength=1.2
    )
    return _plot("Where the step goes", f"Stacked bars of milliseconds per step: {'; '.join(words)}.", figure)


def _loss(comparison: Comparison) -> Plot:
    figure, axes = _axes(2.8)
    words = []
    for index, contender in enumerate(comparison.contenders):
        steps = range(1, len(contender.losses) + 1)
        # Equal curves lie on each other: wide ones below narrow ones keep all of them visible.
        width = 1.5 + 1.2 * (len(comparison.contenders) - 1 - index)
        style = "-" if index == 0 else DASHES[contender.strategy]
        axes.plot(
            steps,
            contender.losses,
            linestyle=style,
            color=COLOURS[contender.strategy],
            linewidth=width,
            label=contender.strategy,
        )
        words.append(f"{contender.strategy} from {contender.losses[0]:.4f} to {contender.losses[-1]:.4f}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss of the global batch")
    axes.grid(axis="y", linewidth=0.6)
    axes.legend(frameon=False)
    return _plot("Loss", f"Curves of the loss over the steps: {'; '.join(words)}.", figure)


def _memory(comparison: Comparison) -> tuple[Plot, ...]:
    measured = [(c.strategy, c.memory) for c in comparison.contenders if c.memory]
    if not measured:
        return ()
    figure, axes = _bars(len(measured))
    words = []
    for row, (strategy, memory) in enumerate(measured):
        sizes = [size / MIB for size in memory.peak_bytes]
        height = 0.7 / len(sizes)
        for index, size in enumerate(sizes):
            axes.barh(row - 0.35 + (index + 0.5) * height, size, color=COLOURS[strategy], height=height * 0.85)
        axes.annotate(f" {max(sizes):,.0f}", (max(sizes), row), va="center", xytext=(3, 0), textcoords="offset points")
        words.append(f"{strategy} {', '.join(f'{size:,.0f}' for size in sizes)}")
    axes.margins(x=0.2)
    _label_rows(axes, [strategy for strategy, _ in measured])
    holder = "process" if comparison.setup.device == "cpu" else "device"
    axes.set_xlabel(f"peak MiB, one bar a {holder}")
    return (_plot("Peak memory", f"Bars of peak MiB of each {holder}: {'; '.join(words)}.", figure),)


def _axes(inches_high: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES_WIDE, inches_high), layout="constrained")
    return figure, figure.add_subplot()


def _bars(num_rows: int, legend_rows: int = 0) -> tuple[Any, Any]:
    figure, axes = _axes(0.8 + 0.36 * num_rows + 0.2 * legend_rows)
    axes.grid(axis="x", linewidth=0.6)
    return figure, axes


def _label_rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _plot(heading: str, alt: str, figure: Any) -> Plot:
    # Names within the drawings derive from this: several share the page, and may not share names.
    with import_matplotlib().rc_context({"svg.hashsalt": heading}):
        return Plot(heading, alt, _svg(figure))


def _svg(figure: Any) -> str:
    """Return the SVG element alone, its stand-in colours replaced and its group names dropped, as they would repeat."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)  # within HTML they are known
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    return svg.replace(TEXT, "currentColor").replace(GRID, "var(--line)").replace("<svg", '<svg aria-hidden="true"', 1)
