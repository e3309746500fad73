"""The plots of ``compare``, and one self-contained HTML page around them."""

from collections.abc import Callable
from html import escape

from lockstep.study.common import MIB
from lockstep.study.compare import table
from lockstep.study.compare.comparison import Comparison, StepTime
from lockstep.study.compare.table import number
from lockstep.study.compare.verdict import Verdict
from lockstep.study.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    TEXT,
    VERMILION,
    Plot,
    drawing_style,
    figure,
    finish_plot,
    import_matplotlib,
    label_rows,
    make_axes,
    make_bars,
)
from lockstep.telemetry.provenance import Provenance

__all__ = ["Plot", "draw", "import_matplotlib"]


# The four plots of the page: throughput, a step's parts, losses, memory.

COLOURS = {
    "single": ORANGE,
    "torch-dp": PURPLE,
    "dp": VERMILION,
    "torch-ddp": SKY,
    "ddp": BLUE,
    "ddp-zero1": GREEN,
}
DASHES = {
    "single": "-",
    "torch-dp": ":",
    "dp": "-.",
    "torch-ddp": "--",
    "ddp": "-",
    "ddp-zero1": (0, (3, 1, 1, 1)),
}

PARTS: tuple[tuple[str, str, Callable[[StepTime], float]], ...] = (
    ("data wait", PURPLE, lambda step: step.data_wait_s),
    ("forward", SKY, lambda step: step.forward_s),
    ("backward", BLUE, lambda step: step.backward_s),
    ("exposed comm.", VERMILION, lambda step: step.exposed_s),
    ("optimizer", GREEN, lambda step: step.optimizer_s),
    ("other", GREY, lambda step: step.other_s),
)


def draw(comparison: Comparison) -> tuple[Plot, ...]:
    """Draw all plots.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    with drawing_style():
        return (_throughput(comparison), _step(comparison), _loss(comparison), *_memory(comparison))


def _throughput(comparison: Comparison) -> Plot:
    figure, axes = make_bars(len(comparison.contenders))
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
    label_rows(axes, [c.strategy for c in comparison.contenders])
    axes.set_xlabel("samples per second, with spread")
    return finish_plot("Throughput", f"Bars of samples per second: {'; '.join(words)}.", figure)


def _step(comparison: Comparison) -> Plot:
    figure, axes = make_bars(len(comparison.contenders), legend_rows=2)
    words = []
    for row, contender in enumerate(comparison.contenders):
        step, left = contender.step, 0.0
        for label, colour, seconds in PARTS:
            width_ms = seconds(step) * 1e3
            axes.barh(row, width_ms, left=left, color=colour, height=0.6, label=label if row == 0 else None)
            left += width_ms
        parts = ", ".join(f"{label} {seconds(step) * 1e3:.2f}" for label, _, seconds in PARTS)
        words.append(f"{contender.strategy} {step.total_s * 1e3:.2f} ({parts})")
    label_rows(axes, [c.strategy for c in comparison.contenders])
    axes.set_xlabel("milliseconds per step")
    axes.legend(
        ncols=3, loc="lower left", bbox_to_anchor=(-0.1, 1.0), frameon=False, columnspacing=1.0, handlelength=1.2
    )
    return finish_plot("Where the step goes", f"Stacked bars of milliseconds per step: {'; '.join(words)}.", figure)


def _loss(comparison: Comparison) -> Plot:
    figure, axes = make_axes(2.8)
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
    return finish_plot("Loss", f"Curves of the loss over the steps: {'; '.join(words)}.", figure)


def _memory(comparison: Comparison) -> tuple[Plot, ...]:
    measured = [(c.strategy, c.memory) for c in comparison.contenders if c.memory]
    if not measured:
        return ()
    figure, axes = make_bars(len(measured))
    words = []
    for row, (strategy, memory) in enumerate(measured):
        sizes = [size / MIB for size in memory.peak_bytes]
        height = 0.7 / len(sizes)
        for index, size in enumerate(sizes):
            axes.barh(row - 0.35 + (index + 0.5) * height, size, color=COLOURS[strategy], height=height * 0.85)
        axes.annotate(f" {max(sizes):,.0f}", (max(sizes), row), va="center", xytext=(3, 0), textcoords="offset points")
        words.append(f"{strategy} {', '.join(f'{size:,.0f}' for size in sizes)}")
    axes.margins(x=0.2)
    label_rows(axes, [strategy for strategy, _ in measured])
    holder = "process" if comparison.setup.device == "cpu" else "device"
    axes.set_xlabel(f"peak MiB, one bar a {holder}")
    return (finish_plot("Peak memory", f"Bars of peak MiB of each {holder}: {'; '.join(words)}.", figure),)


# One self-contained HTML page: the verdict, the plots and the tables, for desktop and phone, light and dark.


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
