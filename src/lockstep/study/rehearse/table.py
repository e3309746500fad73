"""The table at the end of a rehearsal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.study.rehearse.organise import Rehearsal
from lockstep.study.rehearse.verdict import Finding

_NO_LINK = (
    "slowlink and drop hold up what the ranks hand to the transport; no packet is touched. A collective first waits as "
    "long as such a link would take, and so overlaps with nothing: exposed communication is at its worst."
)


def render(rehearsal: Rehearsal) -> RenderableType:
    """Return the table, with a verdict of one line below."""
    table = Table(title="Rehearsal", title_justify="left", expand=False)
    for heading in ("injected", "noticed after", "said", "outcome"):
        table.add_column(heading, overflow="fold")
    for finding in rehearsal.findings:
        table.add_row(_injected(finding), _after(finding), Text(finding.said), _outcome(finding))
    lines: list[RenderableType] = [table, Text(verdict(rehearsal))]
    if any(finding.rule.kind in ("slowlink", "drop") for finding in rehearsal.findings):
        lines.append(Text(_NO_LINK, style="dim"))
    return Group(*lines)


def verdict(rehearsal: Rehearsal) -> str:
    """Return the whole in one sentence."""
    bad = [finding.rule.text for finding in rehearsal.findings if not finding.is_good]
    end = f"the job ended with code {rehearsal.exit_code} after {rehearsal.seconds:.1f} s"
    if bad:
        return f"Not noticed or not injected: {', '.join(bad)}; {end}."
    count = len(rehearsal.findings)
    return f"{'The fault was' if count == 1 else f'All {count} faults were'} noticed or survived; {end}."


def console() -> Console:
    """Return the terminal; where there is none, as wide as lines in a log may be."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def _injected(finding: Finding) -> Text:
    note = finding.note
    where = "" if note is None else f"\nrank {note.rank}, step {note.step}"
    return Text(f"{finding.rule.text}{where}")


def _after(finding: Finding) -> Text:
    return Text("-" if finding.noticed_s is None else f"{finding.noticed_s:.1f} s")


def _outcome(finding: Finding) -> Text:
    return Text(finding.outcome, style="" if finding.is_good else "bold red")
