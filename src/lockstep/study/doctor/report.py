"""`Report`: what an examination came to."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, NotChecked, Severity
from lockstep.study.doctor.plan import Plan


@dataclass(frozen=True)
class Report:
    """Everything that was seen, found, and not checked.

    Attributes:
        plan: The run that it is about.
        host: The machine.
        seen: Pairs of a topic and a line on it.
        findings: Worst first.
        not_checked: What could not be seen.
        seconds: That the examination took.
    """

    plan: Plan
    host: str
    seen: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]
    seconds: float = 0.0

    def count(self, severity: Severity) -> int:
        """Return how many findings are so bad."""
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if the run will hang, fail, be wrong or be slow; 0 if there is nothing worse than notes."""
        return int(any(finding.severity is not Severity.NOTE for finding in self.findings))


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings by severity; those of one severity stay in their order."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def verdict(report: Report) -> str:
    """Say in one sentence how it stands."""
    words = {
        Severity.HANG: "will hang or fail",
        Severity.WRONG: "will be wrong",
        Severity.SLOW: "will be slow",
        Severity.NOTE: "to note",
    }
    counts = [f"{report.count(severity)} {text}" for severity, text in words.items() if report.count(severity)]
    if not counts:
        return "Nothing was found that would hang, falsify or slow this run."
    if report.exit_code == 0:
        return f"Nothing was found that would hang, falsify or slow this run; {report.count(Severity.NOTE)} to note."
    return "Found: " + ", ".join(counts) + "."
