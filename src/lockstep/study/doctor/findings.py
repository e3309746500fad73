"""What the doctor can find: a table of checks, each one function whose docstring is its entry in the documentation."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

# Where each finding is explained, under a heading of its own; `tools/reference.py` writes that part of the page.
PAGE = "docs/reference/doctor.md"


class Severity(StrEnum):
    """How bad a finding is for the run that is planned, worst first."""

    HANG = "hang"
    WRONG = "wrong"
    SLOW = "slow"
    NOTE = "note"


HANG, WRONG, SLOW, NOTE = Severity
WORDS = {HANG: "will hang or fail", WRONG: "will be wrong", SLOW: "will be slow", NOTE: "to note"}


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        kind: The name of the check; also its heading in the documentation.
        severity: How bad it is for the run that is planned.
        found: What was measured or read.
        cost: What it does to the run.
        fix: What to do, in a sentence.
        paste: The fix as lines to paste, into a shell, or into the script where ``where`` names one.
        where: ``FILE:LINE`` for what was found in a script, or the machine in a job of several.
    """

    kind: str
    severity: Severity
    found: str
    cost: str
    fix: str
    paste: str
    where: str = ""

    @property
    def link(self) -> str:
        """Where the documentation explains it."""
        return f"{PAGE}#{self.kind}"


@dataclass(frozen=True)
class NotChecked:
    """Something that could not be checked, and why."""

    what: str
    because: str


F = TypeVar("F")
T = TypeVar("T")


class Problem(NamedTuple):
    """What a check function yields: what differs from one machine to another; the rest stands in its docstring."""

    severity: Severity
    found: str
    paste: str
    where: str = ""


class Check(NamedTuple):
    """An entry of the table: what it judges, its name, and its documentation."""

    facts: type
    section: str
    kind: str
    explanation: str
    cost: str
    fix: str
    function: Callable[[Any], Iterator[Problem]]


# All checks, in the order in which the modules that hold them are imported.
CHECKS: list[Check] = []


def check(facts: type[F]) -> Callable[[Callable[[F], Iterator[Problem]]], Callable[[F], Iterator[Problem]]]:
    """Add a function to the table, under its own name with dashes, in the section of its module.

    It judges ``facts``, what was read of one part of the machine or the program, and reads nothing itself.
    Its docstring ends with a paragraph of two entries, ``Cost:`` and ``Fix:``; report and documentation show them.
    """

    def register(function: Callable[[F], Iterator[Problem]]) -> Callable[[F], Iterator[Problem]]:
        # The last paragraph: an explanation may speak of costs itself.
        explanation, _, rest = (inspect.getdoc(function) or "").rpartition("\n\nCost: ")
        cost, _, fix = rest.partition("\nFix: ")
        kind = function.__name__.replace("_", "-")
        section = function.__module__.rpartition(".")[2].capitalize()
        CHECKS.append(Check(facts, section, kind, explanation, " ".join(cost.split()), " ".join(fix.split()), function))
        return function

    return register


def judge(facts: object) -> list[Finding]:
    """Return what all checks of these facts find."""
    return [
        Finding(entry.kind, severity, found, entry.cost, entry.fix, paste, where)
        for entry in CHECKS
        if entry.facts is type(facts)  # each check judges one kind of facts
        for severity, found, paste, where in entry.function(facts)
    ]


@dataclass(frozen=True)
class Plan:
    """The run that the machine is examined for.

    Attributes:
        devices: Ranks on this machine.
        machines: Machines of the job.
        on_gpus: Whether each rank has a GPU.
        workers: Loader processes of each rank; ``None`` if nobody said.
        master_addr: Where the ranks of several machines meet.
        master_port: The port there; ``None`` if the launcher is to find one.
        checkpoint: Folder that checkpoints are to go to.
        target: The script or task, as it was named.
        is_running: Whether this process is a rank of a job that has begun.
    """

    devices: int
    machines: int = 1
    on_gpus: bool = False
    workers: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    checkpoint: str = "."
    target: str | None = None
    is_running: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks, if all machines have equally many."""
        return self.devices * self.machines

    def describe(self) -> str:
        """Return what is planned, such as ``2 ranks on CPU cores``."""
        device = "GPUs" if self.on_gpus else "CPU cores"
        machines = f" of {self.machines} machines with {self.devices} each" if self.machines > 1 else ""
        return f"{plural(self.world_size, 'rank')} on {device}{machines}"


@dataclass(frozen=True)
class Report:
    """What an examination came to.

    Attributes:
        plan: The run that it is about.
        host: The machine.
        seen: A line for each topic.
        findings: Worst first.
        not_checked: What could not be checked.
        seconds: That the examination took.
    """

    plan: Plan
    host: str
    seen: dict[str, str]
    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 if the run will hang, fail, be wrong or be slow; 0 if there is nothing worse than notes."""
        return int(any(finding.severity is not NOTE for finding in self.findings))

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        severities = [finding.severity for finding in self.findings]
        counts = [f"{severities.count(each)} {text}" for each, text in WORDS.items() if each in severities]
        if self.exit_code:
            return f"Found: {', '.join(counts)}."
        return "; ".join(["Nothing was found that would hang, falsify or slow this run", *counts]) + "."

    def to_json(self) -> str:
        """Return everything as one object; the names in it stay as they are."""
        findings = [asdict(finding) | {"link": finding.link} for finding in self.findings]
        record = asdict(self) | {"verdict": self.verdict, "exit_code": self.exit_code, "findings": findings}
        return json.dumps(record | {"seconds": round(self.seconds, 2)}, indent=2)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings by severity; those of one severity stay in their order."""
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``2 ranks``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names with commas, the first few of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def in_time(seconds: float, action: Callable[[], T]) -> T:
    """Return what ``action`` returns, or raise what it raises. Blocks at most ``seconds``.

    What is not over then goes on in a thread that ends with the process: a name server or a file system that does not
    answer cannot be stopped from outside.

    Raises:
        TimeoutError: It was not over in time.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    # Not an executor, whose threads Python waits for at its end.
    threading.Thread(target=run, name="lockstep-doctor", daemon=True).start()
    return outcome.result(seconds)
