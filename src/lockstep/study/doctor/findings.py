"""The table of checks: each is one function, with its texts above it."""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self, TypeVar

from lockstep.base.activity import plural
from lockstep.errors import ConfigurationError


class Severity(StrEnum):
    """The effect of a finding on the planned run, worst first."""

    HANG = "hang"
    WRONG = "wrong"
    SLOW = "slow"
    NOTE = "note"


WORDS = dict(zip(Severity, ("will hang or fail", "will be wrong", "will be slow", "to note"), strict=True))


@dataclass(frozen=True)
class Finding:
    """A problem on the machine or in the task, and its fix.

    Attributes:
        kind: The name of the check; also its heading in the documentation.
        severity: Its effect on the planned run.
        found: What was measured or read.
        cost: What it costs the run.
        fix: What to do, in a sentence.
        paste: Lines to type into a shell, or into the program.
        where: The machine, in a job on several machines.
    """

    kind: str
    severity: Severity
    found: str
    cost: str
    fix: str
    paste: str = ""
    where: str = ""

    @property
    def more(self) -> str:
        """The command that explains it."""
        return f"lockstep doctor --explain {self.kind}"


@dataclass(frozen=True)
class NotChecked:
    """A check that was not possible, and why."""

    what: str
    because: str


F = TypeVar("F")


class Problem(NamedTuple):
    """What a check yields: the part of a finding that differs from one case to another.

    Attributes:
        found: What was measured or read.
        severity: Instead of the one that the check is registered with.
        paste: Instead of the lines above the check.
    """

    found: str
    severity: Severity | None = None
    paste: str = ""


_Function = Callable[[F], Iterator[Problem]]


class Check(NamedTuple):
    """An entry of the table: the record that a function reads, and the part of its findings that is always the same."""

    record: type
    function: Callable[[Any], Iterator[Problem]]
    finding: Finding

    @property
    def explanation(self) -> str:
        """What its findings mean, in Markdown."""
        about = inspect.getdoc(self.function) or ""  # with PYTHONOPTIMIZE=2 there are no docstrings
        return f"{about.replace('``', '`')}\n\n{self.finding.cost} {self.finding.fix}".lstrip()


# All checks, in the order in which their modules are imported.
CHECKS: list[Check] = []

# By the function of a check: its texts, until `check` takes them.
_texts: dict[object, dict[str, str]] = {}


def check(record: type[F], severity: Severity) -> Callable[[_Function[F]], _Function[F]]:
    """Add a function to the table, under its own name with dashes; below, `cost` and `fix` are required.

    It reads ``record``, what is known of one part of the machine or the task, and nothing else. Its docstring is its
    explanation in the documentation.
    """

    def register(function: _Function[F]) -> _Function[F]:
        kind = function.__name__.replace("_", "-")
        CHECKS.append(Check(record, function, Finding(kind, severity, found="", **_texts.pop(function))))
        return function

    return register


def _text_named(name: str) -> Callable[..., Callable[[_Function[F]], _Function[F]]]:
    def text(*lines: str) -> Callable[[_Function[F]], _Function[F]]:
        def add(function: _Function[F]) -> _Function[F]:
            _texts.setdefault(function, {})[name] = "\n".join(lines)
            return function

        return add

    return text


# The texts of a check: what the problem costs the run, what to do, and the lines to type for it. Names in braces in
# these lines are attributes of the record.
cost, fix, paste = map(_text_named, ("cost", "fix", "paste"))


def judge(record: object) -> list[Finding]:
    """Return what all checks of this record find."""
    findings = []
    for entry in CHECKS:
        for problem in entry.function(record) if entry.record is type(record) else ():
            common = entry.finding
            lines = problem.paste or re.sub(r"{(\w+)}", lambda name: str(getattr(record, name[1])), common.paste)
            severity = problem.severity or common.severity
            findings.append(replace(common, found=problem.found, severity=severity, paste=lines))
    return findings


def explain(kind: str) -> str:
    """Return what a finding means.

    Raises:
        ConfigurationError: No finding has this name.
    """
    explanations = {check.finding.kind: check.explanation for check in CHECKS}
    if kind not in explanations:
        raise ConfigurationError(f"No finding is called {kind}.\nThere are: {', '.join(sorted(explanations))}.")
    return explanations[kind]


@dataclass(frozen=True)
class Plan:
    """The planned run.

    Attributes:
        devices: Ranks on this machine.
        machines: Number of machines.
        on_gpus: Whether each rank has a GPU.
        workers: Loader processes of each rank; ``None`` if unknown.
        master_addr: The address of the rendezvous.
        master_port: Its port, in a running job.
        checkpoint: Folder for checkpoints.
        target: The task, as the user named it.
        is_running: Whether this process is a rank of a running job.
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
        """The number of ranks, if all machines have the same number."""
        return self.devices * self.machines

    def describe(self) -> str:
        """Return the plan in words, such as ``2 ranks on CPU cores``."""
        device = "GPUs" if self.on_gpus else "CPU cores"
        machines = f" of {self.machines} machines with {self.devices} each" if self.machines > 1 else ""
        return f"{plural(self.world_size, 'rank')} on {device}{machines}"


@dataclass(frozen=True)
class Report:
    """The result of an examination.

    Attributes:
        plan: The planned run.
        host: The machine.
        seen: A line for each topic.
        findings: Worst first.
        not_checked: Checks that were not possible.
        seconds: Duration of the examination.
    """

    plan: Plan
    host: str
    seen: dict[str, str]
    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]
    seconds: float = 0.0

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Return the report whose ``asdict`` came as JSON, from another rank."""
        findings = tuple(Finding(**one | {"severity": Severity(one["severity"])}) for one in record["findings"])
        missed = tuple(NotChecked(**one) for one in record["not_checked"])
        return cls(**record | {"plan": Plan(**record["plan"]), "findings": findings, "not_checked": missed})

    @property
    def exit_code(self) -> int:
        """1 if a finding is worse than a note, 0 otherwise."""
        return int(any(finding.severity is not Severity.NOTE for finding in self.findings))

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        severities = [finding.severity for finding in self.findings]
        counts = [f"{severities.count(severity)} {text}" for severity, text in WORDS.items() if severity in severities]
        if self.exit_code:
            return f"Found: {', '.join(counts)}."
        return "; ".join(["Nothing was found that would hang, falsify or slow this run", *counts]) + "."

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        findings = [asdict(finding) | {"more": finding.more} for finding in self.findings]
        record = asdict(self) | {"verdict": self.verdict, "exit_code": self.exit_code, "findings": findings}
        return json.dumps(record | {"seconds": round(self.seconds, 2)}, indent=2)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings sorted by severity; those of one severity stay in their order."""
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, separated by commas, and the number of the others."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
