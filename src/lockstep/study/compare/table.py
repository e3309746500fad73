"""The figures of ``compare`` as tables for a terminal and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.study.common import MIB, WIDTH, Table, bullets, to_json
from lockstep.study.compare.comparison import Candidate, Comparison
from lockstep.study.compare.verdict import Verdict
from lockstep.telemetry.provenance import Provenance

# The figures as tables for a terminal: at most 100 columns, plain text in a pipe.

PEAK_ON_CPU = (
    "Peak memory: growth of a fresh process's resident memory from before the task is built, of the fullest process; "
    "dp holds all its replicas in one process."
)
PEAK_ON_CUDA = "Peak memory: most bytes that tensors held on the fullest device, in fresh processes."

SPEED = ("samples/s", "low - high", "speed-up", "efficiency")
MEMORY_AND_LOSS = ("peak MiB", "imbalance", "loss", "vs single")
SUMMARY = SPEED + MEMORY_AND_LOSS
STEP = ("step", "data wait", "forward", "backward", "exposed", "optimizer", "other")


def render(comparison: Comparison, verdict: Verdict, *, width: int = WIDTH) -> RenderableType:
    """Lay out the tables for ``width`` columns, their footnotes and the verdict."""
    wide = width >= WIDTH
    summaries = [SUMMARY] if wide else [SPEED, MEMORY_AND_LOSS]
    tables = [
        _table(comparison, title(comparison) if index == 0 else "", columns) for index, columns in enumerate(summaries)
    ]
    tables.append(_table(comparison, "Time per step (ms)", STEP))
    notes = [Text(note, style="dim") for note in footnotes(comparison)]
    notes += [Text(f"{left.strategy} was left out: {left.reason}") for left in comparison.left_out]
    return Group(
        *(table.rich() for table in tables), *notes, Text(), Text("Verdict", style="bold"), bullets(verdict.sentences)
    )


def title(comparison: Comparison) -> str:
    """Name the task and how it was run, in one line."""
    setup = comparison.setup
    return (
        f"{setup.task}: {setup.num_devices} x {setup.device}, global batch {setup.global_batch_size}, "
        f"{setup.num_rounds} rounds of {setup.num_steps} steps"
    )


def cells(comparison: Comparison, contender: Candidate) -> dict[str, str]:
    """Return the text of every figure of one contender by its heading; a dash where a figure has no meaning."""
    single = comparison.single
    alone = contender is single
    speed_up = contender.speed_over(single).median
    memory = contender.memory
    imbalance = memory.imbalance if memory else None
    rate, step = contender.rate, contender.step
    exposed = "-" if contender.turns[0].exposed_s is None else _ms(step.exposed_s)
    loss_difference = contender.losses[-1] - single.losses[-1]
    return {
        "samples/s": number(rate.median),
        "low - high": f"{number(rate.low)} - {number(rate.high)}",
        "speed-up": f"{speed_up:.2f}x",
        "efficiency": "-" if alone else f"{speed_up / comparison.setup.num_devices:.0%}",
        "peak MiB": f"{memory.highest_bytes / MIB:,.0f}" if memory else "-",
        "imbalance": f"{imbalance:.2f}x" if imbalance else "-",
        "loss": f"{contender.losses[-1]:.4f}",
        "vs single": "-" if alone else f"{loss_difference:+.1e}" if loss_difference else "0",
        "step": _ms(step.total_s),
        "data wait": _ms(step.data_wait_s),
        "forward": _ms(step.forward_s),
        "backward": _ms(step.backward_s),
        "exposed": exposed,
        "optimizer": _ms(step.optimizer_s),
        "other": _ms(step.other_s),
    }


def footnotes(comparison: Comparison) -> list[str]:
    """Say how the figures are to be read."""
    setup = comparison.setup
    threads = ", ".join(f"{c.strategy} {c.num_threads}" for c in comparison.contenders)
    notes = [
        "Medians over the rounds; low - high holds the true median with 90% certainty (sign test; from 5 rounds on). "
        "Exposed: communication that backward does not hide (backward with synchronisation less backward without; for "
        "dp, copying weights and gradients).",
        f"The loss is that of step {setup.num_steps_in_all}, on the same samples for all.",
    ]
    on_cpu = setup.device == "cpu"
    if on_cpu:
        notes.append(f"Threads of each process or replica: {threads}.")
    if any(contender.memory for contender in comparison.contenders):
        notes.append(PEAK_ON_CPU if on_cpu else PEAK_ON_CUDA)
    return notes


def number(value: float) -> str:
    """Write a rate in at most six characters, with three figures or four."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 9.9995 * unit:
            return f"{value / unit:,.{1 if value < 99.95 * unit else 0}f}{letter}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _table(comparison: Comparison, heading: str, columns: tuple[str, ...]) -> Table:
    rows = []
    for contender in comparison.contenders:
        texts = cells(comparison, contender)
        rows.append([contender.strategy, *(texts[column] for column in columns)])
    return Table(heading, ("strategy", *columns), rows, numbers=columns)


# The figures as JSON, for other programs; names stay.

VERSION = 1
"""Grows when a name or a meaning changes; new names leave it as it is."""


def comparison_to_json(comparison: Comparison, verdict: Verdict, provenance: Provenance) -> str:
    """Return all figures, raw and summarized."""
    record = {
        "version": VERSION,
        "setup": asdict(comparison.setup),
        "provenance": asdict(provenance),
        "contenders": [_contender(comparison, contender) for contender in comparison.contenders],
        "left_out": [asdict(left) for left in comparison.left_out],
        "verdict": asdict(verdict),
    }
    return to_json(record)


def _contender(comparison: Comparison, contender: Candidate) -> dict[str, Any]:
    memory = contender.memory
    return {
        "strategy": contender.strategy,
        "num_threads": contender.num_threads,
        "samples_per_s": asdict(contender.rate),
        "speed_up": asdict(contender.speed_over(comparison.single)),
        "efficiency": contender.speed_over(comparison.single).median / comparison.setup.num_devices,
        "step": asdict(contender.step),
        "peak_bytes": None if memory is None else list(memory.peak_bytes),
        "imbalance": None if memory is None else memory.imbalance,
        "last_loss": contender.losses[-1],
        "loss_difference": contender.losses[-1] - comparison.single.losses[-1],
        "turns": [asdict(turn) for turn in contender.turns],
        "losses": list(contender.losses),
    }
