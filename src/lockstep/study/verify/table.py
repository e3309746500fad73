"""The verdict, what was compared, and each experiment, for a terminal; plain text in a pipe."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.study.verify.determinism import tell
from lockstep.study.verify.diagnose import Verification
from lockstep.study.verify.differences import Comparison
from lockstep.study.verify.verdict import exactness, sentences, steps

PLURALS = {
    "size": "sizes of data set and batch",
    "initial parameter": "initial parameters",
    "initial buffer": "initial buffers",
    "sample": "samples",
    "loss": "losses",
    "learning rate": "learning rates",
    "gradient": "gradients",
    "parameter": "parameters",
    "buffer": "buffers",
}


def render(verification: Verification, name: str) -> RenderableType:
    """Lay out everything; the verdict comes first."""
    subject = verification.subject
    engine = " of torch's DistributedDataParallel" if subject.torch_ddp else ""
    num = subject.num_devices
    heading = f"{name}: one process and {num} rank{'s' * (num > 1)}{engine}, {steps(verification)}"
    parts: list[RenderableType] = [Text(heading, style="bold"), Text()]
    parts += [Text(sentence) for sentence in sentences(verification)]
    if verification.comparison is not None:
        parts += [Text(), _compared(verification.comparison)]
    if verification.rows:
        parts.append(_experiments(verification))
    notes = [f"Computed in {exactness(verification)}."]
    if verification.why_single:
        notes.append(f"Not in float64, since the task fails there: {verification.why_single}")
    if verification.remark:
        notes.append(verification.remark)
    if not verification.repeatable:
        notes.append("One process is not the same run twice.")
    parts += [Text(note, style="dim") for note in notes]
    return Group(*parts)


def _compared(comparison: Comparison) -> Table:
    table = _table("What was compared", "", "largest difference", "first difference")
    for kind, worst in comparison.worst.items():
        first = next((difference for difference in comparison.differences if difference.kind == kind), None)
        largest = "none" if worst == 0 else "-" if worst == float("inf") else f"{worst:.1e}"
        table.add_row(PLURALS[kind], largest, "" if first is None else tell(first))
    return table


def _experiments(verification: Verification) -> Table:
    table = _table("Experiments", "turned off", "runs", "outcome")
    for row in verification.rows:
        table.add_row(row.turned_off, row.compared, Text(row.outcome, style="" if row.same else "bold"))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
