"""`verify` from beginning to end, whoever starts the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lockstep.errors import ConfigurationError, LaunchTimeout, ModelMismatch
from lockstep.study.verify import ranks as ranks_study
from lockstep.study.verify.determinism import outcome
from lockstep.study.verify.differences import EXACT, Comparison, compare
from lockstep.study.verify.division import tolerance_of
from lockstep.study.verify.experiment import Subject
from lockstep.study.verify.findings import Cause, Finding, Row, fix, own_generator, reproducible
from lockstep.study.verify.inside import (
    Alone,
    AloneStudy,
    Outcome,
    gathered,
    run_alone,
    run_rank,
    study_alone,
    study_rank,
)
from lockstep.study.verify.trace import Trace

RANKS_PAIR = "one process, ranks"


class Processes(Protocol):
    """Runs a function in each of some processes."""

    def __call__(self, num: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``function(*args, world)`` of each of ``num`` processes, by rank."""


@dataclass(frozen=True)
class Verification:
    """What came of it.

    Attributes:
        subject: What was examined.
        same: Whether it is the same run.
        comparison: One process against the ranks; None where the ranks could not start.
        repeatable: Whether one process is the same run twice, to the bit.
        findings: The causes, if it is not the same run.
        rows: The experiments that led to them.
        explained: Whether nothing is left with what was found turned off.
        why_single: Why fp32 and not float64; empty for float64.
        remark: What else there is to say; may be empty.
    """

    subject: Subject
    same: bool
    comparison: Comparison | None
    repeatable: bool
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    explained: bool
    why_single: str
    remark: str = ""


def diagnose(subject: Subject, processes: Processes, say: Callable[[str], None]) -> Verification:
    """Compare one process with the ranks, and find what makes them differ.

    Args:
        subject: What is examined.
        processes: Starts one process, or as many as there are ranks.
        say: Told what is being done.
    """
    try:
        alone, traces, remark = _train(subject, processes, say)
    except _CannotTrain as stop:
        found_at_once = (stop.finding,)
        return Verification(stop.alone.subject, False, None, stop.alone.again.same, found_at_once, (), True, "")
    subject, num = alone.subject, subject.num_devices
    tolerance = EXACT if subject.settings.reproducible and not subject.torch_ddp else tolerance_of(subject)
    comparison = compare(alone.traces, traces, tolerance, strided=subject.torch_ddp)
    if comparison.same and alone.again.same:
        return Verification(subject, True, comparison, True, (), (), True, alone.why_single, remark)
    say("not the same; what one process can find out")
    study: AloneStudy = processes(1, study_alone, alone)[0]
    rows = [*study.repetition.rows]
    findings = list(study.repetition.findings)
    explained = study.repetition.restored
    if study.division is not None and not comparison.same:
        say(f"what {num} ranks can find out")
        found = processes(num, study_rank, replace(study, shares={}, fixes={}), subject)  # traces are large
        runs = {off: gathered([one[0][off] for one in found]) for off in found[0][0]}
        fixed = {name: gathered([one[1][name] for one in found]) for name in found[0][1]}
        on_ranks = ranks_study.study_ranks(subject, study.base, study.shares, runs, alone.traces, tolerance_of(subject))
        by_division = _of_interest(study.division.findings, subject)
        findings += on_ranks.findings
        rows += [*study.division.rows, *on_ranks.rows]
        findings += [_with_fix(one, study, fixed, subject, rows) for one in by_division]
        explained = explained and study.division.explained and on_ranks.explained
    return Verification(
        subject,
        False,
        comparison,
        alone.again.same,
        _unique(findings),
        tuple(rows),
        explained and bool(findings),
        alone.why_single,
        remark,
    )


class _CannotTrain(Exception):
    """The ranks could not train together, and why is known at once."""

    def __init__(self, alone: Alone, finding: Finding) -> None:
        super().__init__(finding.evidence)
        self.alone, self.finding = alone, finding


def _train(
    subject: Subject, processes: Processes, say: Callable[[str], None], remark: str = ""
) -> tuple[Alone, list[Trace], str]:
    """Train in one process and on the ranks; without the epoch's last batch if the ranks cannot train on that."""
    num = subject.num_devices
    say("one process, twice")
    alone: Alone = processes(1, run_alone, subject)[0]
    subject = alone.subject
    say(f"{num} rank{'s' * (num > 1)}")
    try:
        return alone, [trace for found in processes(num, run_rank, subject) for trace in found], remark
    except ModelMismatch as error:
        evidence = f"The ranks do not build the same model: {str(error).splitlines()[0]}"
        raise _CannotTrain(alone, Finding(Cause.MODEL, evidence, fix(Cause.MODEL, subject))) from error
    except Exception as error:
        if alone.traces[0].is_stream and isinstance(error, ConfigurationError):
            # What one process can train on and the ranks cannot is a stream that they do not read alike.
            evidence = str(error).splitlines()[0]
            raise _CannotTrain(alone, Finding(Cause.DATA, evidence, fix(Cause.DATA, subject))) from error
        first = tuple(range(len(subject.steps)))
        if subject.steps == first or isinstance(error, LaunchTimeout):
            raise
        reason = str(error).splitlines()[0]
    say("the ranks cannot train on the epoch's last batch; without it")
    remark = f"Without the epoch's last batch, on which the ranks fail ({reason}): consider Task.drop_last."
    return _train(replace(subject, steps=first), processes, say, remark)


def _of_interest(findings: Sequence[Finding], subject: Subject) -> list[Finding]:
    """Return what matters: in reproducible mode one process divides the batch as the ranks do."""
    if subject.settings.reproducible is None or subject.torch_ddp:
        return list(findings)
    return [finding for finding in findings if finding.cause in (Cause.RANDOM, Cause.BUFFERS)]


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the first finding of each cause."""
    return tuple({finding.cause: finding for finding in reversed(findings)}.values())[::-1]


def _with_fix(
    finding: Finding, study: AloneStudy, fixed: dict[str, Outcome], subject: Subject, rows: list[Row]
) -> Finding:
    """Return ``finding`` with what came of its fix, where that was tried."""
    name = "convert" if finding.cause is Cause.BATCHNORM else "reproducible"
    if finding.cause in (Cause.WEIGHTING, Cause.SUM) or name not in fixed:
        return finding
    words = {
        "convert": "lockstep.SyncBatchNorm instead",
        "reproducible": f"{reproducible(subject)} instead",
    }[name]
    one, ranks = study.fixes[name], fixed[name]
    if isinstance(one, str) or isinstance(ranks, str):
        reason = one if isinstance(one, str) else ranks
        rows.append(Row(words, RANKS_PAIR, f"failed: {reason}", False))
        return finding
    tolerance = EXACT if name == "reproducible" else tolerance_of(subject)
    found = compare(one, ranks, tolerance)
    rows.append(Row(words, RANKS_PAIR, outcome(found), found.same))
    if found.same:
        bits = ", to the bit" if name == "reproducible" else ""
        return replace(finding, tried=f"Tried: with it, one process and the ranks are the same run{bits}.")
    if finding.cause is Cause.RANDOM:
        return replace(
            finding, fix=own_generator(subject), tried=f"Tried: {reproducible(subject)} alone does not help."
        )
    return replace(finding, tried=f"Tried: by itself it does not help, the runs {outcome(found)}.")
