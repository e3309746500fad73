"""What became of a fault: pure functions of when it struck, what the job said, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.study.rehearse.notes import Note
from lockstep.study.rehearse.observe import Line
from lockstep.study.rehearse.rules import Rule

_SPEAKS_OF = {
    "kill": r"kill|SIGKILL|signal 9|is gone|whose process|has died|out of memory",
    "hang": r"hang|waits? |waited|stuck|does not answer|is in |no progress",
    "straggler": r"slow|straggl|behind|loses|late\b",
    "nan": r"\bnan\b|not finite|non-finite|infinit|not a number",
    "bitflip": r"differ|drift|diverg|unequal",
    "oom": r"out of memory|OutOfMemory",
    "slowlink": r"slow|bandwidth|communication",
    "drop": r"waits? |waited|hang|slow|drop|timed out|unreachable",
    "disk-full": r"No space left|disk is full|no room",
}
"""What a line must say, or one just before it, to be about a fault of this kind."""

_HEADLINES = 4
"""A report may take so many lines between its subject and the rank."""

_RANKS = re.compile(r"\branks? ((?:\d+(?:-\d+)?(?:, | and )?)+)|\brank(\d+)\b", re.IGNORECASE)
_RESTART = re.compile(r"restart \d+ of \d+|ranks are started again")
_OWN = re.compile(r"(\[ranks? [\d, -]+\] )?rehearse: ")
"""How lines begin that the rehearsal itself says: they are no report."""


@dataclass(frozen=True)
class Finding:
    """What became of one fault.

    Attributes:
        note: When and where it struck; ``None`` if it did not.
        noticed_s: Seconds until it was reported, by name; ``None`` if it was not.
        said: The line that reported it.
        outcome: In words.
        is_good: Whether it struck and was reported, or survived where no harm is done silently.
    """

    rule: Rule
    note: Note | None
    noticed_s: float | None
    said: str
    outcome: str
    is_good: bool


def judge_all(
    rules: Sequence[Rule], struck: Sequence[Note | None], lines: Sequence[Line], exit_code: int
) -> tuple[Finding, ...]:
    """Say what became of each fault; see `judge`. One that a job does survive is not blamed for another's end."""
    found = [judge(rule, note, lines, exit_code) for rule, note in zip(rules, struck, strict=True)]
    is_explained = any(finding.noticed_s is not None for finding in found)
    until = f"survived, until the job ended with code {exit_code}"
    return tuple(
        replace(finding, outcome=until, is_good=True)
        if is_explained
        and finding.note is not None
        and not finding.is_good
        and finding.rule.kind in ("slowlink", "drop")
        else finding
        for finding in found
    )


def judge(rule: Rule, note: Note | None, lines: Sequence[Line], exit_code: int) -> Finding:
    """Say what became of a fault.

    Args:
        rule: The fault.
        note: When it struck.
        lines: What the job said, in time order.
        exit_code: How the job ended.
    """
    if note is None:
        outcome = _never(rule) if exit_code == 0 else f"did not strike: the job had ended with code {exit_code}"
        return Finding(rule, None, None, "", outcome, is_good=False)
    after = [line for line in lines if line.time_ns >= note.time_ns and not _OWN.match(line.text)]
    report = find_report(rule, after)
    noticed_s = None if report is None else (report.time_ns - note.time_ns) / 1e9
    said = "" if report is None else _tidy(report.text)
    if exit_code != 0:
        outcome = f"ended with code {exit_code}"
        if report is None:
            outcome += f", without naming {_subject(rule)}"
        return Finding(rule, note, noticed_s, said, outcome, is_good=report is not None)
    if any(_RESTART.search(line.text) for line in after):
        return Finding(rule, note, noticed_s, said, "recovered by a restart", is_good=True)
    if report is not None:
        return Finding(rule, note, noticed_s, said, "reported, the run went on", is_good=True)
    if rule.is_silent:
        return Finding(rule, note, None, "", "not noticed", is_good=False)
    return Finding(rule, note, None, "", "survived", is_good=True)


def find_report(rule: Rule, lines: Sequence[Line]) -> Line | None:
    """Return the first line that tells of the fault and names its rank."""
    about = re.compile(_SPEAKS_OF[rule.kind], re.IGNORECASE)
    for number, line in enumerate(lines):
        if rule.rank is not None and rule.rank not in ranks_in(line.text):
            continue
        before = lines[max(0, number - _HEADLINES) : number + 1] if rule.rank is not None else [line]
        if any(about.search(found.text) for found in before):
            return line
    return None


def ranks_in(text: str) -> set[int]:
    """Return the ranks that a line names, as in ``rank 3``, ``ranks 0-2, 5`` or ``[rank1]``."""
    found: set[int] = set()
    for many, one in _RANKS.findall(text):
        for part in re.findall(r"\d+(?:-\d+)?", many or one):
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return found


def _never(rule: Rule) -> str:
    where = f"never came to {rule.place} in step {rule.step}" if rule.place else f"never wrote from step {rule.step} on"
    return f"did not strike: rank {rule.rank} {where}" if rule.rank is not None else f"did not strike: ranks {where}"


def _subject(rule: Rule) -> str:
    return "it" if rule.rank is None else f"rank {rule.rank}"


def _tidy(text: str) -> str:
    return text.strip().removeprefix("lockstep: ")
