"""The result of ``verify``: in sentences, as tables for a terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text
from typing_extensions import override

from lockstep.study.common import Shown, Table, to_json
from lockstep.study.verify.causes import Diagnosis, Row, tolerance_of
from lockstep.study.verify.fingerprint import TraceComparison
from lockstep.study.verify.interventions import Subject
from lockstep.train.plan import plural

PLURALS = {"size": "sizes of data set and batch", "sample": "samples", "loss": "losses"}


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What `verify` found.

    Attributes:
        subject: What was examined.
        same: Whether it is the same run.
        comparison: One process against the ranks; None where the ranks could not start.
        repeatable: Whether one process is the same run twice, to the bit.
        findings: The causes, if it is not the same run.
        rows: The experiments that led to them.
        explained: Whether the runs are the same with all causes turned off.
        why_single: Why fp32 and not float64; empty for float64.
        remark: Anything else to report; may be empty.
    """

    subject: Subject
    same: bool
    comparison: TraceComparison | None
    repeatable: bool
    findings: tuple[Diagnosis, ...] = ()
    rows: tuple[Row, ...] = ()
    explained: bool = True
    why_single: str = ""
    remark: str = ""

    @property
    def name(self) -> str:
        """The task's file, if it came from one."""
        return Path(self.subject.task).name if isinstance(self.subject.task, str) else "task"

    @override
    def __rich__(self) -> RenderableType:
        """Lay out verdict, what was compared, and each experiment; the verdict comes first."""
        subject, comparison = self.subject, self.comparison
        heading = f"{self.name}: one process and {plural(subject.num_devices, 'rank')}, {_steps(subject.steps)}"
        parts: list[RenderableType] = [Text(heading, style="bold"), Text()]
        parts += [Text(sentence) for sentence in sentences(self)]
        if comparison is not None:
            rows: list[list[str | Text]] = []
            for kind, worst in comparison.worst.items():
                first = next((difference for difference in comparison.differences if difference.kind == kind), "")
                largest = "none" if worst == 0 else f"{worst:.1e}" if isfinite(worst) else "-"
                rows.append([PLURALS.get(kind, f"{kind}s"), largest, str(first)])
            parts += [Text(), Table("What was compared", ["", "largest difference", "first difference"], rows).rich()]
        if self.rows:
            experiments: list[list[str | Text]] = [
                [row.turned_off, row.compared, Text(row.outcome, style="" if row.same else "bold")] for row in self.rows
            ]
            parts.append(Table("Experiments", ["turned off", "runs", "outcome"], experiments).rich())
        notes = (
            f"Computed in {_exactness(self)}.",
            self.why_single and f"Not computed in float64, because the task fails there: {self.why_single}",
            self.remark,
            "" if self.repeatable else "Two runs of one process differ.",
        )
        parts += [Text(note, style="dim") for note in notes if note]
        return Group(*parts)

    def to_json(self) -> str:
        """Return everything for other programs; docs/verify.md describes the names, which stay."""
        subject, comparison = self.subject, self.comparison
        first = comparison.first if comparison else None
        record = {
            "version": 1,  # grows when a name or a meaning changes; new names leave it as it is
            "task": self.name,
            "same": self.same,
            "setup": {
                "num_devices": subject.num_devices,
                "engine": "ddp",
                "steps": list(subject.steps),
                "seed": subject.settings.seed,
                "reproducible": subject.settings.reproducible,
                "precision": "float64" if subject.double else "fp32",
                "exactness": _exactness(self),
                "why_not_float64": self.why_single or None,
            },
            "repeatable": self.repeatable,
            "first_difference": asdict(first) if first else None,
            "largest_differences": comparison.worst if comparison else None,
            "causes": [asdict(finding) for finding in self.findings],
            "remark": self.remark or None,
            "explained": self.explained,
            "experiments": [asdict(row) for row in self.rows],
            "verdict": sentences(self),
        }
        return to_json(record)


def sentences(verification: Verification) -> list[str]:
    """Return the verdict, a paragraph each: what is, then cause and fix for each cause."""
    found = [_headline(verification)]
    num = len(verification.findings)
    for number, finding in enumerate(verification.findings, 1):
        which = f"Cause {number} of {num}" if num > 1 else "Cause"
        found.append(f"{which}: {finding.cause}. {finding.evidence}")
        found.append(f"Fix: {finding.fix} {finding.tried}".rstrip())
    failed = [row for row in verification.rows if row.error]
    if not verification.same and not verification.findings:
        found.append(
            "No cause was found: turning off each of the features below did not make the runs the same. "
            "Check how the first tensor that differs is computed, and whether that can depend on the rank."
        )
    elif not verification.same and not verification.explained:
        found.append("There may be more causes: run verify again after fixing these.")
    if failed and not verification.explained:
        found.append(
            f"{len(failed)} of {len(verification.rows)} experiments failed, and exclude no cause: {failed[0].error}"
        )
    return found


def _headline(verification: Verification) -> str:
    subject, comparison = verification.subject, verification.comparison
    who = plural(subject.num_devices, "rank")
    if verification.same:
        verb = "train" if subject.num_devices > 1 else "trains"
        return (
            f"The same training run: {who} {verb} as one process does, over {_steps(subject.steps)} "
            f"({_exactness(verification)})."
        )
    if comparison is None:
        return f"Not the same training run: the {who} cannot train together."
    if comparison.first is None:
        return f"Not reproducible: one process and {who} agree, but no two runs are equal to the bit."
    return (
        f"Not the same training run: {who} differ{'s' * (subject.num_devices == 1)} from one process, first in the "
        f"{comparison.first}."
    )


def _exactness(verification: Verification) -> str:
    """Return in what precision the runs were compared, and how closely."""
    subject = verification.subject
    closely = f"{tolerance_of(subject).relative:.0e} of each tensor's size"
    return f"{'float64' if subject.double else 'fp32'}, to {'the bit' if subject.settings.reproducible else closely}"


def _steps(numbers: tuple[int, ...]) -> str:
    """Return which steps were trained, such as ``steps 0 to 2 and 5``."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] == numbers[-2] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    first = f"steps {numbers[0]} to {numbers[-2]}" if len(numbers) > 2 else f"steps {numbers[0]}"
    return f"{first} and {numbers[-1]}, the epoch's last"
