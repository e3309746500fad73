"""What was found as tables for a terminal: at most 100 columns, plain text in a pipe."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.study.tune.open_stage import Result
from lockstep.study.tune.outcome import Check, Outcome
from lockstep.study.tune.search import TOGETHER
from lockstep.study.tune.text import becomes, in_all
from lockstep.study.tune.values import in_words

HOW_TO_READ = (
    "Times: samples/s over those of the settings at that time, side by side in short rounds; the median, and the range "
    "that holds the true one with 90% certainty. Kept is what is outside of the noise and gives 2% or more. Training: "
    "what a change does to it; 'rounding' is the same but for the order in which sums are added."
)


def render(outcome: Outcome) -> RenderableType:
    """Lay out the tables, what there is to say, and the conclusion."""
    parts: list[RenderableType] = [Text(_title(outcome), style="bold"), _changes(outcome)]
    parts += [Text(f"{stage}: {why}", style="dim") for stage, why in outcome.skips]
    parts.append(Text(HOW_TO_READ, style="dim"))
    if outcome.checks:
        parts += [Text(), Text("Advice of the recorded run, and what came of it", style="bold"), _advice(outcome)]
    parts.append(Text())
    parts += [Text(line) for line in [outcome.memory, *outcome.notes] if line]
    parts.append(Text(in_all(outcome), style="bold"))
    if outcome.found != outcome.start:
        parts.append(Text(becomes(outcome.effect)))
    return Group(*parts)


def _title(outcome: Outcome) -> str:
    began = in_words({"strategy": outcome.start.get("strategy", "ddp"), **outcome.start})
    return (
        f"{outcome.task}: {outcome.num_devices} x {outcome.device}, global batch {outcome.global_batch_size}, "
        f"from {began}; {outcome.seconds:.0f} s"
    )


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _changes(outcome: Outcome) -> Table:
    table = _table()
    for name in ("stage", "change"):
        table.add_column(name)
    for name in ("times", "low - high", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("training", no_wrap=True)
    table.add_column("")
    for result in outcome.results:
        table.add_row(*_row(result, outcome))
    return table


def _row(result: Result, outcome: Outcome) -> tuple[str, ...]:
    ratio = result.ratio
    times = "-" if ratio is None else f"{ratio.median:.2f}x"
    span = "-" if ratio is None else f"{ratio.low:.2f} - {ratio.high:.2f}"
    verdict = "kept" if result.kept else result.why
    if result.stage == TOGETHER and outcome.total is None:
        verdict = f"not confirmed: {result.why}"
    return result.stage, result.candidate.name, times, span, str(result.num_rounds), result.effect.words, verdict


def _advice(outcome: Outcome) -> Table:
    table = _table()
    table.add_column("advice")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in outcome.checks:
        table.add_row(*_check(check))
    return table


def _check(check: Check) -> tuple[str, ...]:
    bound = "at most " if check.at_most else ""
    predicted = f"{bound}{check.predicted:.2f}x"
    if check.measured is None:
        return check.change, predicted, "-", check.why
    measured = f"{check.measured.median:.2f}x ({check.measured.low:.2f} - {check.measured.high:.2f})"
    error = check.error
    assert error is not None
    held = check.at_most and check.predicted >= check.measured.median
    return check.change, predicted, measured, "held" if held else f"{error:+.0%}"
