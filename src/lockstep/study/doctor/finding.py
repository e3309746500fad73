"""`Finding`: one thing that will hang, falsify or slow a run, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lockstep.study.doctor.kinds import Kind

PAGE = "docs/doctor.md"
"""Where each finding is explained, under a heading of its own."""


class Severity(Enum):
    """How bad it is, worst first."""

    HANG = "hang"
    WRONG = "wrong"
    SLOW = "slow"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        kind: Which; also its heading in the docs.
        severity: How bad it is for the run that is planned.
        found: What was seen, with the measured values.
        cost: What it does to the run.
        fix: What to do, in a sentence.
        paste: The fix as lines to paste, into a shell, or into the script where ``where`` names one.
        where: ``FILE:LINE`` for what was found in a script, or the machine in a job of several.
    """

    kind: Kind
    severity: Severity
    found: str
    cost: str
    fix: str
    paste: str
    where: str = ""

    @property
    def link(self) -> str:
        """Where the docs explain it."""
        return f"{PAGE}#{self.kind.value}"


@dataclass(frozen=True)
class NotChecked:
    """Something that could not be seen, and why."""

    what: str
    because: str
