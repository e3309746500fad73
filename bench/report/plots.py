"""The drawings of the benchmark's page, as SVG that follows the page's colours, light or dark."""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.report.run import Run, models, ratio, rounds
from lockstep.study.common import Spread

# Okabe and Ito's palette, told apart with every common form of colour blindness.
OURS, TORCH, SHM, PEER, BOUND, OTHER = "#0072B2", "#E69F00", "#56B4E9", "#CC79A7", "#999999", "#009E73"
COLOURS = {
    "none": BOUND,
    "torch": TORCH,
    "torch-view": TORCH,
    "torch-shm": SHM,
    "torch-zero": TORCH,
    "accelerate": PEER,
    "fabric": PEER,
    "ours-gloo": OURS,
    "ours": OURS,
    "ours-zero": OURS,
    "dp": OTHER,
    "single": BOUND,
}
TEXT, GRID = "#010203", "#040506"
"""Stand-ins that no drawing uses otherwise; in the SVG they become the page's own colours."""
INCHES_WIDE = 5.2
STYLE = {
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


@dataclass(frozen=True)
class Drawing:
    """A figure, its heading, and a sentence on how to read it."""

    heading: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """Return the SVG element, without what would repeat in the page."""
        stream = io.StringIO()
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": self.heading}):
            self.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        found = stream.getvalue()
        found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.DOTALL)
        found = re.sub(r'<g id="[^"]*"', "<g", found)
        found = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", found)
        return found.replace(TEXT, "currentColor").replace(GRID, "var(--line)")


def draw(run: Run) -> list[Drawing]:
    """Return the drawings of all parts that the run has."""
    makers: tuple[Callable[[Run], Iterator[Drawing]], ...] = (steps, sums, growth, memory, alone, starts)
    with matplotlib.rc_context(STYLE):
        return [drawing for maker in makers for drawing in maker(run)]


def steps(run: Run) -> Iterator[Drawing]:
    for part, optimizer in (("steps", "AdamW as it comes"), ("steps_fused", "AdamW(fused=True)")):
        for name in models(run, part):
            yield bars(
                f"Step of {name}, {optimizer}",
                "Time of a step over that of no synchronisation at all, two ranks; shorter is better.",
                over(rounds(run, part, "models", name), "none"),
            )


def sums(run: Run) -> Iterator[Drawing]:
    sizes = run["parts"].get("all_reduce", {}).get("sizes", {})
    if not sizes:
        return
    figure, axes = axes_of(3.2)
    colours = {"copy": BOUND, "gloo": TORCH, "shm": SHM, "in place": OURS}
    for name, colour in colours.items():
        spreads = [Spread(**found["seconds"][name]) for found in sizes.values()]
        numbers = [int(size) for size in sizes]
        axes.plot(numbers, [s.median * 1e6 for s in spreads], color=colour, marker="o", markersize=3, label=name)
        axes.fill_between(
            numbers, [s.low * 1e6 for s in spreads], [s.high * 1e6 for s in spreads], color=colour, alpha=0.25
        )
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds a call")
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False)
    caption = (
        "Two ranks. The copy is the bound: every rank copies as many bytes. In place: a tensor that all ranks map."
    )
    yield Drawing("all_reduce", caption, figure)


def growth(run: Run) -> Iterator[Drawing]:
    cores = run["provenance"]["machine"]["cores"]
    for name, by_ranks in run["parts"].get("ranks", {}).get("models", {}).items():
        figure, axes = axes_of(2.8)
        for contender in ("torch", "torch-shm", "ours"):
            spreads = [ratio(found["rounds_s"], contender, "none") for found in by_ranks.values()]
            present = [spread for spread in spreads if spread is not None]
            places = range(len(present))
            colour = COLOURS[contender]
            axes.plot(places, [s.median for s in present], color=colour, marker="o", label=contender)
            axes.fill_between(places, [s.low for s in present], [s.high for s in present], color=colour, alpha=0.2)
        axes.axhline(1, color=BOUND, linewidth=1)
        axes.set_xticks(range(len(by_ranks)), list(by_ranks))
        axes.set(xlabel=f"ranks on {cores} cores", ylabel="step over no synchronisation")
        axes.grid(axis="y", linewidth=0.6)
        axes.legend(frameon=False)
        yield Drawing(f"More ranks than cores: {name}", "The same work for each rank; 1 is no synchronisation.", figure)


def memory(run: Run) -> Iterator[Drawing]:
    for name, found in run["parts"].get("memory", {}).get("mib", {}).items():
        spreads = {contender: Spread.of(kinds["PSS"]) for contender, kinds in found.items()}
        caption = "Peak MiB (PSS) beyond what the process had before; dp: one process for both ranks' work."
        yield bars(f"Peak memory: {name}", caption, spreads, unit="MiB", bound=None)


def alone(run: Run) -> Iterator[Drawing]:
    spreads = {}
    for name in models(run, "one_rank"):
        for contender, spread in over(rounds(run, "one_rank", "models", name), "none").items():
            if contender != "none":
                spreads[f"{name}: {contender}"] = percent(spread)
    if spreads:
        caption = "Time beyond the bare loop's in a world of one rank; again is the bare loop once more."
        yield bars("One rank", caption, spreads, unit="% more than the bare loop", bound=0)


def starts(run: Run) -> Iterator[Drawing]:
    for part, key, heading, caption in (
        ("launch", "moments", "From the command", "Seconds until a rank has done it, of two ranks."),
        ("import_time", "imports", "Imports", "Seconds of a fresh interpreter; engines: lockstep's classes loaded."),
    ):
        found = run["parts"].get(part, {}).get(key, {})
        groups = found.items() if key == "moments" else [("", found)] if found else []
        spreads = {
            f"{group} {contender}".strip(): Spread.of(values)
            for group, figures in groups
            for contender, values in figures["rounds_s"].items()
        }
        if spreads:
            yield bars(heading, caption, spreads, unit="seconds", bound=None)


def over(seconds: dict[str, list[float]], baseline: str) -> dict[str, Spread]:
    found = {name: ratio(seconds, name, baseline) for name in seconds}
    return {name: spread for name, spread in found.items() if spread is not None}


def percent(spread: Spread) -> Spread:
    return Spread(*((value - 1) * 100 for value in (spread.median, spread.low, spread.high)))


def bars(
    heading: str,
    caption: str,
    spreads: dict[str, Spread],
    *,
    unit: str = "times no synchronisation",
    bound: float | None = 1,
) -> Drawing:
    figure, axes = axes_of(0.8 + 0.28 * len(spreads))
    farthest = max(spread.high for spread in spreads.values())
    for row, (name, spread) in enumerate(spreads.items()):
        reach = [[spread.median - spread.low], [spread.high - spread.median]]
        colour = next((COLOURS[part] for part in (name, name.rpartition(": ")[2]) if part in COLOURS), SHM)
        if "lockstep" in name or "engines" in name:
            colour = OURS
        axes.barh(row, spread.median, xerr=reach, color=colour, ecolor=TEXT, capsize=2, height=0.65)
        axes.annotate(
            f"{spread.median:.3g}", (max(spread.high, 0), row), va="center", xytext=(4, 0), textcoords="offset points"
        )
    if bound is not None:
        axes.axvline(bound, color=TEXT, linewidth=1)
    axes.set_xlim(right=farthest * 1.15 if farthest > 0 else None)
    axes.set_yticks(range(len(spreads)), list(spreads))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="x", linewidth=0.6)
    return Drawing(heading, caption, figure)


def axes_of(inches_high: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(INCHES_WIDE, inches_high), layout="constrained")
    return figure, figure.add_subplot()
