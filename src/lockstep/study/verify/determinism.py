"""Is one process by itself the same run twice? If not: what makes it one?"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.comm.world import World
from lockstep.errors import LockstepError
from lockstep.study.verify.differences import EXACT, Comparison, Difference, compare
from lockstep.study.verify.experiment import Experiment, Given, Off, Subject, Switch
from lockstep.study.verify.findings import Cause, Finding, Row, fix
from lockstep.study.verify.perform import perform

TWICE = "one process, twice"

_TRIALS: tuple[tuple[Switch, str, str], ...] = (
    ("random", "random numbers in forward", "it draws random numbers that do not follow the seed of the run"),
    ("outside", "clock and system randomness", "it asks the clock or the system's random numbers"),
    ("operators", "operators that are not deterministic", "an operator of torch adds up in an order that varies"),
    ("threads", "all threads but one", "threads add up in an order that varies"),
)


@dataclass(frozen=True)
class Repetition:
    """What came of running the same thing twice.

    Attributes:
        base: What has to be turned off so that one process is the same run twice.
        restored: Whether it is then.
    """

    base: Off
    restored: bool
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]


def study_repetition(subject: Subject, given: Given, world: World, plain: Comparison) -> Repetition:
    """Find what makes two runs of one process differ, which ``plain`` says of them."""
    base: Off = frozenset()
    findings, rows = [], [Row("nothing", TWICE, outcome(plain), plain.same)]
    first = plain.first
    if first is None:
        return Repetition(base, True, (), ())
    if plain.has("sample", "size"):
        base |= {"data"}
        evidence = f"One process loads other samples the second time ({tell(first)}): they do not follow the seed."
        findings.append(Finding(Cause.DATA, evidence, fix(Cause.DATA, subject)))
    if plain.has("initial parameter", "initial buffer"):
        base |= {"initial"}
        evidence = "One process starts from other weights the second time: they do not follow the seed."
        findings.append(Finding(Cause.RANDOM, evidence, fix(Cause.MODEL, subject)))
    if findings:
        again = _twice(subject, given, world, base)
        rows.append(Row(" and ".join(finding.cause.value for finding in findings), TWICE, outcome(again), again.same))
        if again.same:
            return Repetition(base, True, tuple(findings), tuple(rows))
        first = again.first
        assert first is not None
    text = f"The same process, run twice from the same seed, gives another {tell(first)}"
    for switch, words, reason in _TRIALS:
        try:
            again = _twice(subject, given, world, base | {switch})
        except LockstepError:
            raise
        except RuntimeError as error:
            rows.append(Row(words, TWICE, f"failed: {str(error).splitlines()[0]}", False))
            continue
        rows.append(Row(words, TWICE, outcome(again), again.same))
        if again.same:
            evidence = f"{text}; with {words} turned off it does not: {reason}."
            findings.append(Finding(Cause.OPERATOR, evidence, fix(Cause.OPERATOR, subject)))
            return Repetition(base | {switch}, True, tuple(findings), tuple(rows))
    evidence = f"{text}, and turning off {', '.join(words for _, words, _ in _TRIALS)} does not change that."
    findings.append(Finding(Cause.OPERATOR, evidence, fix(Cause.OPERATOR, subject)))
    return Repetition(base, False, tuple(findings), tuple(rows))


def _twice(subject: Subject, given: Given, world: World, off: Off) -> Comparison:
    experiment = Experiment("one", off)
    one, two = (perform(subject, experiment, given, world) for _ in range(2))
    return compare(one, two, EXACT)


def tell(difference: Difference) -> str:
    """Name a difference in running text."""
    name = "" if difference.name in (difference.kind, "batch") else f" {difference.name}"
    ranks = f" on rank{'s' * (len(difference.ranks) > 1)} {_list(difference.ranks)}" if difference.ranks else ""
    step = "" if difference.step is None else f" at step {difference.step}"
    kind = {"size": "size:", "sample": "samples"}.get(difference.kind, difference.kind)
    return f"{kind}{name}{step}{ranks} ({difference.words})"


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def outcome(comparison: Comparison) -> str:
    """Say in a few words what came of a comparison."""
    return "the same" if comparison.first is None else f"differ: {tell(comparison.first)}"
