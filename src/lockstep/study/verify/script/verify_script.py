"""`verify` for a script: run it with one rank and with N, compare the traces, and name what makes them differ."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigurationError
from lockstep.study.common import log
from lockstep.study.verify.script.runs import Runs
from lockstep.study.verify.script.script_causes import (
    EXPLAINS,
    are_padded,
    compare_traces,
    diagnosis,
    numbers_of,
    of_means,
    of_ranks,
    other_samples,
    passes_of,
    structural,
)
from lockstep.study.verify.script.trace import ScriptTrace
from lockstep.study.verify.verdict import Cause, Diagnosis, Row, Setup, Verification, by_design


def verify_script(
    command: Sequence[str],
    *,
    devices: int = 2,
    steps: int = 4,
    minutes: float | None = None,
    allow_writes: bool = False,
    report: Callable[[str], None] = log,
) -> Verification:
    """Run a script with one rank and with N, and find out whether it is the same training run.

    Starts processes and blocks until they are done: two runs, and up to three more if they differ. The script is not
    changed, but its passes over loaders are cut short; see [Note: the script is cut short]. Each run sees the files as
    they are now; what it writes is removed after it.

    Args:
        command: The script and its arguments.
        devices: Ranks.
        steps: Updates of each epoch that are compared.
        minutes: For all runs together.
        allow_writes: Whether the runs may change files.
        report: Called with a text about progress.

    Raises:
        ConfigurationError: The script fails with one rank, or updates nothing; the time was over before two runs were
            done; or the system permits no way to protect files.
    """
    runs = Runs(command, steps, report, minutes=minutes, allow_writes=allow_writes)
    (one,), failure = runs.run(1)
    if failure and one.passes:
        runs.cuts = False
        (one,), failure = runs.run(1)
    if failure or not one.steps:
        what = "fails" if failure else "makes no update"
        raise ConfigurationError(
            f"{command[0]} {what} with one rank, so nothing can be compared.\n{failure or 'It has ended.'}\n"
            f"Run it: lockstep run --devices 1 {' '.join(command)}"
        )
    ranks, failure = runs.run(devices)
    # A wrapper, and what prepares a model, may do nothing on one rank.
    engine = "ddp" if any(trace.engine == "ddp" for trace in (one, *ranks)) else "none"
    numbers = numbers_of(one, ranks) or numbers_of(one, [])
    setup = Setup(Path(command[0]).name, devices, numbers, one.precision, one.tolerance, engine)
    unseen = dict.fromkeys(text for trace in (one, *ranks) for text in trace.unseen)
    unseen |= {} if runs.cuts else {"What follows these updates: the script fails if a pass is cut short.": None}
    result = Verification(setup, False, None, True, remark="\n".join(f"Not compared: {text}" for text in unseen))
    if failure:
        fix = f"Mend what the error says. lockstep run --devices {devices} {' '.join(command)} shows it, too."
        error, _, trace = failure.partition("\n\n")
        remark = f"{result.remark}\n{trace}".strip()
        return replace(result, findings=(Diagnosis(Cause.FAILED, error, fix),), remark=remark)
    return _judge(runs, result, one, ranks, report) if numbers_of(one, ranks) else result


def _judge(
    runs: Runs, result: Verification, one: ScriptTrace, ranks: Sequence[ScriptTrace], report: Callable[[str], None]
) -> Verification:
    """Compare one rank with N; if they differ, also without what may differ in a script that has no error."""
    # Draws of loader processes cannot be seen, but rank 0 has the seeds of one process.
    is_padded = are_padded(one, ranks)
    is_drawn = any(other_samples(whole, part) for whole, part, *_ in passes_of(one, ranks)) and not is_padded
    made: dict[str, Any] = {"is_augmented": is_drawn or one.is_augmented, "is_padded": is_padded}
    one, *ranks = (replace(trace, **made) for trace in (one, *ranks))
    comparison, findings = compare_traces(one, ranks), list(structural(one, ranks))
    for finding in findings:
        report(f"found: {finding.cause}. {finding.evidence}")
    result = _with_findings(replace(result, comparison=comparison, explained=comparison.same), findings)
    draws = one.is_augmented or any(step.drawn for step in one.steps)
    # Of samples that are alike, as nothing is drawn, batch norm multiplies the rounding: also if it is synchronised.
    off = ["random"] * draws + ["batchnorm"] * bool(ranks[0].norms or (draws and ranks[0].seen["batchnorm"]))
    if off and not comparison.same and not _causes(findings) & EXPLAINS:
        clean, failure = runs.run(1, *off)
        clean_ranks, failure = ([], failure) if failure else runs.run(len(ranks), *off)
        trial = " and ".join(off), "one rank, ranks"
        if failure:  # then nothing is known about the rest
            return replace(result, rows=(Row.failed(*trial, failure),))
        one, *ranks = (replace(trace, **made) for trace in (*clean, *clean_ranks))
        without = compare_traces(one, ranks)
        result = replace(result, rows=(Row(*trial, str(without), without.same),), explained=without.same)
        if without.same:
            by_design = dict(_by_design(off, one, ranks[0].norms))
            apart_from = () if findings else tuple(by_design)
            findings += [] if Cause.MASKS in _causes(findings) else by_design.values()
            return replace(_with_findings(result, findings), apart_from=apart_from)
        findings += [finding for finding in structural(one, ranks) if finding.cause is Cause.DATA]
    return result if result.explained else _explain(runs, result, one, ranks, off, findings)


def _explain(
    runs: Runs,
    result: Verification,
    one: ScriptTrace,
    ranks: Sequence[ScriptTrace],
    off: Sequence[str],
    findings: list[Diagnosis],
) -> Verification:
    """Find why the numbers differ."""
    findings += of_ranks(ranks, one.norms)
    differences = compare_traces(one, ranks).differences
    first = next((each for each in differences if each.kind in ("gradient", "parameter", "buffer")), None)
    if first is not None and not _causes(findings) & EXPLAINS:
        findings += of_means(one, ranks, first)
    if not findings:
        again, failure = runs.run(1, *off)
        repeated, trial = compare_traces(one, again or [one]), ("nothing else", "one rank, twice")
        row = Row.failed(*trial, failure) if failure else Row(*trial, str(repeated), repeated.same)
        result = replace(result, rows=(*result.rows, row))
        if not failure and not repeated.same:
            findings.append(diagnosis(Cause.OPERATOR, f"One rank, run twice, gives another {repeated.first}."))
    return _with_findings(result, findings)


def _with_findings(result: Verification, findings: Sequence[Diagnosis]) -> Verification:
    """Return the result with the first finding of each cause."""
    first = {finding.cause: finding for finding in reversed(findings)}
    is_same = result.comparison is not None and result.comparison.same and not findings
    return replace(result, findings=tuple(first.values())[::-1], same=is_same)


def _causes(findings: Sequence[Diagnosis]) -> set[Cause]:
    return {finding.cause for finding in findings}


def _by_design(off: Sequence[str], one: ScriptTrace, norms: Sequence[str]) -> Iterator[tuple[str, Diagnosis]]:
    """Yield what makes the runs differ, if they are the same without it, each with its diagnosis."""
    draws = one.seen["random"]
    found = [*by_design(draws, norms)]
    if "random" in off and not draws:
        found.insert(0, ("random augmentation", Cause.RANDOM, "Each rank draws its own random numbers for samples."))
    is_prepared = any(pass_.is_prepared for pass_ in one.passes)
    order = " On one rank, samplers draw from the same generator, so later epochs have another order."
    for words, cause, evidence in found:
        yield words, diagnosis(cause, evidence + order * (is_prepared and cause is Cause.RANDOM))
