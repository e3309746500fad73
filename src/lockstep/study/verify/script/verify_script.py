"""`verify` for a script: run it with one rank and with N, compare the traces, and name what makes them differ."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.study.common import log
from lockstep.study.verify.script.runs import Runs
from lockstep.study.verify.script.script_causes import (
    EXPLAINS,
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
from lockstep.study.verify.verdict import Cause, Diagnosis, Row, Setup, Verification
from lockstep.train.plan import plural


def verify_script(
    command: Sequence[str], *, devices: int = 2, steps: int = 4, report: Callable[[str], None] = log
) -> Verification:
    """Run a script with one rank and with N, and find out whether it is the same training run.

    Starts processes and blocks until they are done: two runs, and up to three more if they differ. The script is not
    changed, but its passes over loaders are cut short; see [Note: the script is cut short].

    Args:
        command: The script and its arguments.
        devices: Ranks.
        steps: Updates of each epoch that are compared.
        report: Called with a text about progress.

    Raises:
        ConfigurationError: The script fails with one rank, or updates nothing.
    """
    runs = Runs(command, devices, steps, report)
    (one,), failure = runs.run(1)
    if not one.steps:
        raise ConfigurationError(
            f"{command[0]} makes no update with one rank, so nothing can be compared.\n{failure or 'It has ended.'}\n"
            f"Run it: lockstep run --devices 1 {' '.join(command)}"
        )
    ranks, failure = runs.run(devices)
    if any(other_samples(expected, actual) for expected, actual, *_ in passes_of(one, ranks)):
        # On rank 0, whose seeds are those of one process: padded with the rest of the batch, for example.
        one, *ranks = (replace(trace, is_augmented=True) for trace in (one, *ranks))
    remark = failure and f"The script has failed on {plural(devices, 'rank')}:\n{failure}"
    # A wrapper, and what prepares a model, may do nothing on one rank.
    engine = "ddp" if any(trace.engine == "ddp" for trace in (one, *ranks)) else "none"
    numbers = numbers_of(one, ranks)
    setup = Setup(Path(command[0]).name, devices, numbers or numbers_of(one, []), one.precision, one.tolerance, engine)
    result = Verification(setup, False, None, True, remark=remark)
    if not numbers:
        return result
    comparison = compare_traces(one, ranks)
    findings, rows, apart_from = list(structural(one, ranks)), [], dict[str, Diagnosis]()
    draws = one.is_augmented or any(step.draws for step in one.steps)
    off = ["random"] * draws + ["batchnorm"] * bool(one.norms)
    if off and not comparison.same:
        # A script without errors differs in these, and they would hide errors.
        (clean, *_), failed = runs.run(1, *off)
        clean_ranks, failed_on_ranks = runs.run(devices, *off)
        if reason := _failure(failed or failed_on_ranks, failure, numbers_of(clean, clean_ranks)):
            rows.append(Row.failed(" and ".join(off), "one rank, ranks", reason))
            off = []
        else:
            by_index = one.is_augmented
            one, *ranks = (replace(trace, is_augmented=by_index) for trace in (clean, *clean_ranks))
            without = compare_traces(one, ranks)
            rows.append(Row(" and ".join(off), "one rank, ranks", str(without), without.same))
            if without.same:
                apart_from = dict(_by_design(off, one))
    last = compare_traces(one, ranks)
    if not last.same:
        findings += of_ranks(ranks, one.norms)
        first = next((diff for diff in last.differences if diff.kind in ("gradient", "parameter", "buffer")), None)
        if first is not None and not EXPLAINS & {finding.cause for finding in findings}:
            findings += of_means(one, ranks, first)
        if not findings:
            (again, *_), failed = runs.run(1, *off)
            reason, repeated = _failure(failed, failure, numbers_of(again, [])), compare_traces(one, [again])
            row = Row("nothing else", "one rank, twice", str(repeated), repeated.same)
            rows.append(Row.failed(row.turned_off, row.compared, reason) if reason else row)
            if repeated.first is not None and not reason:
                evidence = f"One rank, run twice, gives another {repeated.first}."
                findings.append(diagnosis(Cause.OPERATOR, evidence))
    by_design = [] if Cause.MASKS in {finding.cause for finding in findings} else [*apart_from.values()]
    return replace(
        result,
        same=comparison.same and not findings,
        apart_from=() if findings else tuple(apart_from),
        comparison=comparison,
        # Of each cause the first.
        findings=tuple({finding.cause: finding for finding in reversed([*findings, *by_design])}.values())[::-1],
        rows=tuple(rows),
        explained=last.same,
    )


def _failure(failure: str, before: str, numbers: Sequence[int]) -> str:
    """Return why a run proves nothing; empty if it has failed at its end only, as the script does ``before``."""
    return "" if numbers and (before or not failure) else failure.partition("\n")[0] or "no updates on all ranks"


def _by_design(off: Sequence[str], one: ScriptTrace) -> Iterator[tuple[str, Diagnosis]]:
    """Yield what makes the runs differ, if they are the same without it, each with its diagnosis."""
    if "random" in off:
        is_dropout = all("bernoulli" in draw or "dropout" in draw for draw in one.draws)
        what = "dropout masks" if is_dropout else "random numbers in forward"
        draws = ", ".join(one.draws) or "in the data set"
        evidence = f"Each rank draws its own random numbers ({draws})."
        yield what if one.draws else "random augmentation", diagnosis(Cause.RANDOM, evidence)
    if "batchnorm" in off:
        norms = ", ".join(one.norms[:3])
        evidence = f"Each rank normalises with the mean and variance of its own samples ({norms})."
        yield "batch norm statistics", diagnosis(Cause.BATCHNORM, evidence)
