"""The report for a terminal; plain text in a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lockstep.study.doctor.finding import Finding, NotChecked, Severity
from lockstep.study.doctor.report import Report, verdict

_TITLES = {
    Severity.HANG: ("Will hang or fail", "bold red"),
    Severity.WRONG: ("Will be wrong", "bold magenta"),
    Severity.SLOW: ("Will be slow", "bold yellow"),
    Severity.NOTE: ("To note", "bold cyan"),
}


def show(report: Report, console: Console) -> None:
    """Print the report; without the blanks that fill lines up where it goes to a file or another program."""
    if console.is_terminal:
        _print(report, console)
        return
    with console.capture() as captured:
        _print(report, console)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _print(report: Report, console: Console) -> None:
    """Print what was seen, what was found, worst first, and what was not checked; the verdict comes last."""
    target = f"{report.plan.target} as " if report.plan.target else ""
    console.print(Text(f"lockstep doctor: {target}{report.plan.describe()}, seen from {report.host}", style="bold"))
    console.print(Padding(_seen(report), (1, 0, 1, 2)))
    for severity, (title, style) in _TITLES.items():
        findings = [finding for finding in report.findings if finding.severity is severity]
        if findings:
            console.print(Rule(Text(f"{title} ({len(findings)})", style=style), align="left", style=style))
            for finding in findings:
                _show(finding, console, style)
            console.print()
    if report.not_checked:
        console.print(Rule(Text("Not checked", style="bold"), align="left", style="dim"))
        console.print(Padding(_missed(report.not_checked), (0, 0, 1, 2)))
    ends = f" Exit code {report.exit_code}; took {report.seconds:.1f} s."
    console.print(Text(verdict(report), style="bold" if report.exit_code else "bold green") + Text(ends, style="dim"))


def _seen(report: Report) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for topic, line in report.seen:
        grid.add_row(topic, Text(line))
    return grid


def _show(finding: Finding, console: Console, style: str) -> None:
    console.print()
    name = Text.assemble("  ", (finding.kind.value, style), f"  {finding.where}" if finding.where else "")
    console.print(name)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for label, text in (("found", finding.found), ("cost", finding.cost), ("fix", finding.fix)):
        grid.add_row(label, Text(text))
    console.print(Padding(grid, (0, 0, 0, 4)))
    for line in finding.paste.splitlines():
        # Never wrapped, so that it can be pasted.
        console.print(Text(f"           {line}", style="green"), soft_wrap=True)
    console.print(Text(f"    more   {finding.link}", style="dim"))


def _missed(missed: tuple[NotChecked, ...]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for one in missed:
        grid.add_row("-", Text(f"{one.what}, because {one.because}"))
    return grid
