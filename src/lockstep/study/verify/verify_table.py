"""What ``verify`` found, in sentences, as tables for a terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.study.verify.causes import Cause, tell
from lockstep.study.verify.diagnose import Verification
from lockstep.study.verify.fingerprint import DOUBLE, SINGLE, Difference, TraceComparison

# What verify says: whether it is the same run, why not, and what to do.

LISTED = (
    Cause.DATA,
    Cause.WEIGHTING,
    Cause.RANDOM,
    Cause.BATCHNORM,
    Cause.RATES,
    Cause.BUFFERS,
    Cause.OPERATOR,
    Cause.SUM,
)


def sentences(verification: Verification) -> list[str]:
    """Return the verdict, a paragraph each: what is, then cause and fix for each cause."""
    found = [_headline(verification)]
    num = len(verification.findings)
    for number, finding in enumerate(verification.findings, 1):
        which = f"Cause {number} of {num}" if num > 1 else "Cause"
        found.append(f"{which}: {finding.cause.value}. {finding.evidence}")
        found.append(" ".join(filter(None, [f"Fix: {finding.fix}", finding.tried])))
    if not verification.same and not verification.findings:
        names = ", ".join(cause.value for cause in LISTED)
        found.append(
            f"No cause was found. Turning off each of these did not make the runs the same: {names}. "
            "Look at what the first tensor that differs is computed from, and how that can know the rank."
        )
    elif not verification.same and not verification.explained:
        found.append("That may not be all: verify again once it is fixed.")
    return found


def exactness(verification: Verification) -> str:
    """Say in what precision the runs were compared, and how closely."""
    subject = verification.subject
    number = "float64" if subject.double else "fp32"
    if subject.settings.reproducible and not subject.torch_ddp:
        return f"{number}, to the bit"
    tolerance = DOUBLE if subject.double else SINGLE
    return f"{number}, to {tolerance.relative:.0e} of each tensor's size"


def steps(verification: Verification) -> str:
    """Say which steps were trained, such as ``steps 0 to 2 and 5``."""
    numbers = verification.subject.steps
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] == numbers[-2] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    first = f"steps {numbers[0]} to {numbers[-2]}" if len(numbers) > 2 else f"steps {numbers[0]}"
    return f"{first} and {numbers[-1]}, the epoch's last"


def _headline(verification: Verification) -> str:
    subject, comparison = verification.subject, verification.comparison
    num = subject.num_devices
    who = f"{num} rank{'s' * (num > 1)}" + (" with torch's DistributedDataParallel" if subject.torch_ddp else "")
    if verification.same:
        verb = "train" if num > 1 else "trains"
        return (
            f"The same training run: {who} {verb} as one process does, over {steps(verification)} "
            f"({exactness(verification)})."
        )
    if comparison is None:
        return f"Not the same training run: the {who} cannot train together."
    if comparison.first is None:
        return f"Not the same training run twice: one process and {who} agree, but no two runs do to the bit."
    return (
        f"Not the same training run: {who} part from one process in the {tell(comparison.first)}, the first of all "
        "that was compared."
    )


# The verdict, what was compared, and each experiment, for a terminal; plain text in a pipe.

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


def _compared(comparison: TraceComparison) -> Table:
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


# The same as JSON, for other programs; names stay.

VERSION = 1
"""Grows when a name or a meaning changes; new names leave it as it is."""


def to_json(verification: Verification, name: str) -> str:
    """Return everything."""
    subject, comparison = verification.subject, verification.comparison
    record = {
        "version": VERSION,
        "task": name,
        "same": verification.same,
        "setup": {
            "num_devices": subject.num_devices,
            "engine": "torch-ddp" if subject.torch_ddp else "ddp",
            "steps": list(subject.steps),
            "seed": subject.settings.seed,
            "reproducible": subject.settings.reproducible,
            "precision": "float64" if subject.double else "fp32",
            "exactness": exactness(verification),
            "why_not_float64": verification.why_single or None,
        },
        "repeatable": verification.repeatable,
        "first_difference": _difference(comparison.first) if comparison and comparison.first else None,
        "largest_differences": {kind: _finite(size) for kind, size in comparison.worst.items()} if comparison else None,
        "causes": [{**asdict(finding), "cause": finding.cause.value} for finding in verification.findings],
        "remark": verification.remark or None,
        "explained": verification.explained,
        "experiments": [asdict(row) for row in verification.rows],
        "verdict": sentences(verification),
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _difference(difference: Difference) -> dict[str, Any]:
    return {**asdict(difference), "size": _finite(difference.size), "ranks": list(difference.ranks)}


def _finite(size: float) -> float | None:
    return size if isfinite(size) else None
