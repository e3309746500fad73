"""The page of ``compare``: verdict, plots and tables in one HTML file."""

from html import escape

from lockstep.study import drawing
from lockstep.study.compare.comparison import Comparison, footnotes, tables, title
from lockstep.study.compare.verdict import Verdict
from lockstep.telemetry.provenance import Provenance

# By strategy, its colour and dashes.
STYLES = {
    "single": (drawing.ORANGE, "-"),
    "torch-dp": (drawing.PURPLE, ":"),
    "dp": (drawing.VERMILION, "-."),
    "torch-ddp": (drawing.SKY, "--"),
    "ddp": (drawing.BLUE, "-"),
    "ddp-zero1": (drawing.GREEN, (0, (3, 1, 1, 1))),
}

# Of `drawing.PARTS`: what a rank waits for others is within the exchange here.
NAMES = ("data wait", "forward", "backward", "exchange", "optimizer", "other")


def draw(comparison: Comparison) -> tuple[drawing.Plot, ...]:
    """Draw all plots.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    rows = {}
    for candidate in comparison.contenders:
        step = candidate.step
        seconds = (step.data_wait_s, step.forward_s, step.backward_s, step.exposed_s, step.optimizer_s, step.other_s)
        rows[candidate.strategy] = dict(zip(NAMES, seconds, strict=True))
    with drawing.drawing_style():
        steps = drawing.stacked_bars("Where the step goes", "milliseconds per step", rows)
        return steps, _loss(comparison)


def _loss(comparison: Comparison) -> drawing.Plot:
    figure, axes = drawing.make_axes(2.8, grid="y")
    words = []
    for index, candidate in enumerate(comparison.contenders):
        colour, dashes = STYLES[candidate.strategy]
        losses = candidate.losses
        # Equal curves lie on each other: wide ones below narrow ones keep all of them visible.
        width = 1.5 + 1.2 * (len(comparison.contenders) - 1 - index)
        look = {"color": colour, "linestyle": dashes, "linewidth": width, "label": candidate.strategy}
        axes.plot(range(1, len(losses) + 1), losses, **look)
        words.append(f"{candidate.strategy} from {losses[0]:.4f} to {losses[-1]:.4f}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss of the global batch")
    axes.legend()
    return drawing.finish_plot("Loss", f"Curves of the loss over the steps: {'; '.join(words)}.", figure)


def render(comparison: Comparison, verdict: Verdict, provenance: Provenance) -> str:
    """Return the page.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    setup = comparison.setup
    speeds, steps = tables(comparison)
    notes = "\n".join(f'<p class="soft">{escape(note)}</p>' for note in footnotes(comparison))
    facts = " &middot; ".join(f"{escape(name)} {escape(text)}" for name, text in provenance.facts())
    heading = f"{setup.task} on one device{f' and on {setup.num_devices}' if setup.num_devices > 1 else ''}"
    body = f"""<div class="plots">
{"".join(drawing.figure(plot) for plot in draw(comparison))}
</div>
<h2 id="figures">Figures</h2>
{drawing.html_table(speeds)}
<h2>{escape(steps.title)}</h2>
{drawing.html_table(steps)}
{notes}
<footer>
<p><code>{escape(setup.command)}</code></p>
<p>{facts}</p>
</footer>"""
    tab = f"{setup.task} on {setup.num_devices} {setup.device}: lockstep compare"
    return drawing.html_page(tab, heading, title(comparison), verdict.sentences, body)
