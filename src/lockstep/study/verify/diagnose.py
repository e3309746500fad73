"""`verify`: train as one process and as ranks, compare the traces, run the experiments that find the cause, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import cloudpickle

from lockstep.base.activity import plural
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, LaunchTimeout, ModelMismatch
from lockstep.study.common import check_numbers, load, log, run_ranks
from lockstep.study.verify import causes
from lockstep.study.verify.causes import Findings, Lab, Outcome, Run, attempt
from lockstep.study.verify.fingerprint import EXACT, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import Division, Experiment, Given, Off, Subject
from lockstep.study.verify.reference_loop import perform, perform_and_keep
from lockstep.study.verify.verdict import FIXES_OF_TASK, Cause, Diagnosis, Setup, Verification
from lockstep.train.plan import check_batch
from lockstep.train.settings import Settings
from lockstep.train.task import Task

# How long the processes may take for each part. Ranks that wait for each other are reported much earlier.
TIMEOUT_S = 3600.0

# Called with a function, its arguments and a number of devices; see `run_ranks`.
Processes = Callable[..., list[Any]]


def verify(
    task: Task | str, *, devices: int = 2, steps: int = 4, settings: Settings | None = None, quiet: bool = False
) -> Verification:
    """Train some steps of ``task`` as one process and as N ranks, and find out whether it is the same run.

    Starts processes and blocks until they are done. If the runs differ, it first turns off random draws in forward and
    batch statistics. If the runs are then the same, that is the result; if not, it finds the cause by turning off one
    feature at a time.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Ranks, which train with ``ddp``.
        steps: Steps to train; the last one is the last of the epoch if its batch is not full.
        settings: How to train; ``steps``, ``epochs`` and ``workers`` have no meaning here.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task or the devices cannot be used; names what to change.
        RankFailed: A rank failed.
        LaunchTimeout: The processes did not finish in time.
    """
    settings = settings or Settings()
    check_numbers(devices, steps=steps)
    try:
        check_batch(load(task, prepares=True), settings, devices)
    except ConfigurationError as error:
        # A file that raises in this process, which is not a rank, may still run in a rank. The other errors: no such
        # file, no task in it, or a batch that cannot be divided.
        if error.__cause__ is None:
            raise
    # A form of the task from which every run can create a new copy.
    subject = Subject(task if isinstance(task, str) else cloudpickle.dumps(task), settings, devices, steps)
    return diagnose(subject, partial(run_ranks, timeout_s=TIMEOUT_S), (lambda _: None) if quiet else log)


def diagnose(subject: Subject, processes: Processes, report: Callable[[str], None]) -> Verification:
    """Compare one process with the ranks, and find what makes them differ.

    Args:
        subject: The task to examine.
        processes: Starts one process, or as many as there are ranks.
        report: Called with a text about progress; also in the processes, so it must be picklable.
    """
    # Replicas that differ are a finding here, not an error.
    subject = replace(subject, settings=replace(subject.settings, check_replicas=0))
    alone, on_ranks, remark = _train(subject, processes, report)
    subject = alone.subject
    result = Verification(_setup_of(subject), False, None, alone.again.same, why_single=alone.why_single, remark=remark)
    if isinstance(on_ranks, Diagnosis):
        return replace(result, findings=(on_ranks,))
    comparison = compare(alone.traces, on_ranks, result.setup.tolerance)
    result = replace(result, comparison=comparison)
    if comparison.same and alone.again.same:
        return replace(result, same=True)
    if outside := _outside(alone):
        # Parameters that each rank trains separately make everything else differ.
        return replace(result, findings=(outside,), explained=False)
    findings, lab = Findings(subject), Lab(subject, alone.given, report)

    @cache
    def run(off: Off | None, division: Division) -> Outcome:
        outcomes = processes(lab.run, off, division, devices=subject.num_devices if division == "ranks" else 1)
        lab.num += 1
        failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
        return failed[0] if failed else [trace for outcome in outcomes for trace in outcome]

    # In reproducible mode, ranks must have the same masks and statistics.
    is_by_design = alone.again.same and not subject.settings.reproducible
    if is_by_design and (apart := causes.study_apart(findings, alone.given.norms, run)):
        return replace(result, apart_from=apart, findings=tuple(findings.diagnoses), rows=tuple(findings.rows))
    lab, findings, division, shares = processes(study_alone, lab, findings, alone.again, devices=1)[0]
    # If one process never gives the same run twice, a comparison with ranks proves nothing.
    if shares and not comparison.same:
        findings.rows += division.rows
        causes.study_ranks(findings, lab.base, shares, run, alone.traces)
        findings.diagnoses += [_with_fix(one, run, findings) for one in division.diagnoses]
        findings.explained &= division.explained
    # Of each cause the first.
    diagnoses = tuple({one.cause: one for one in reversed(findings.diagnoses)}.values())[::-1]
    explained = findings.explained and bool(diagnoses)
    return replace(result, findings=diagnoses, rows=tuple(findings.rows), explained=explained)


def _setup_of(subject: Subject) -> Setup:
    settings = subject.settings
    return Setup(
        Path(subject.task).name if isinstance(subject.task, str) else "task",
        subject.num_devices,
        subject.steps,
        "float64" if subject.double else "fp32",
        EXACT if settings.reproducible else subject.tolerance,
        seed=settings.seed,
        reproducible=settings.reproducible,
    )


def _train(
    subject: Subject, processes: Processes, report: Callable[[str], None], remark: str = ""
) -> tuple[Alone, list[Trace] | Diagnosis, str]:
    """Train in one process and on the ranks; without the epoch's last batch if the ranks cannot train on that.

    Returns:
        One process; the traces of the ranks, or why they cannot train together; a remark.
    """
    num = subject.num_devices
    report("one process, twice")
    alone: Alone = processes(run_alone, subject, devices=1)[0]
    subject, findings = alone.subject, Findings(alone.subject)
    report(plural(num, "rank"))
    try:
        outcomes = processes(perform, subject, _plain(subject, "ranks"), Given(), devices=num)
        return alone, [trace for traces in outcomes for trace in traces], remark
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, ModelMismatch):
            findings.add(Cause.MODEL, f"The ranks do not build the same model: {reason}")
        elif alone.traces[0].is_stream and isinstance(error, ConfigurationError):
            # If one process can train on the data and the ranks cannot, the ranks read different streams.
            findings.add(Cause.DATA, reason)
        elif outside := _outside(alone):
            findings.diagnoses.append(outside)
        if findings.diagnoses:
            return alone, findings.diagnoses[0], remark
        # The last batch of an epoch may leave a rank with one sample, or none, which batch norm does not accept.
        first = tuple(range(len(subject.steps)))
        if subject.steps == first or isinstance(error, LaunchTimeout):
            raise
    report("the ranks cannot train on the epoch's last batch; without it")
    remark = f"Without the epoch's last batch, on which the ranks fail ({reason}): consider Task.drop_last."
    return _train(replace(subject, steps=first), processes, report, remark)


def _outside(alone: Alone) -> Diagnosis | None:
    """Return the diagnosis of parameters that were trained, but that no module registers; None if there are none."""
    if not (shapes := alone.given.outside):
        return None
    evidence = (
        f"Training changes parameters that no module of the model registers, of shape {', '.join(shapes[:5])}: each "
        "rank trains its own."
    )
    return Diagnosis(Cause.OUTSIDE, evidence, FIXES_OF_TASK[Cause.OUTSIDE])


# The causes that have to be fixed in the code; the fix of the others, or one of them, is --reproducible.
_BY_HAND = (Cause.WEIGHTING, Cause.SUM, Cause.TERM, Cause.STATE, Cause.PARAMETERS)


def _with_fix(diagnosis: Diagnosis, run: Run, findings: Findings) -> Diagnosis:
    """Return ``diagnosis`` with the result of its fix: of both runs in reproducible mode."""
    if diagnosis.cause in _BY_HAND:
        return diagnosis
    flag = f"--reproducible {findings.subject.num_devices}"
    one, ranks = run(None, "one"), run(None, "ranks")
    if (comparison := findings.compare(f"{flag} instead", causes.PLAIN_PAIR, one, ranks, EXACT)) is None:
        return diagnosis
    if comparison.same:
        return replace(diagnosis, tried=f"Tried: with {flag}, one process and the ranks are the same run, to the bit.")
    fix = causes.OWN_GENERATOR if diagnosis.cause is Cause.RANDOM else diagnosis.fix
    return replace(diagnosis, fix=fix, tried=f"Tried: {flag} alone does not help.")


# The work of the processes: a single process, and all ranks; first to compare, then to find causes.


@dataclass(frozen=True)
class Alone:
    """The result of the single process.

    Attributes:
        subject: With the steps, and the precision in which the task can be trained.
        given: Its data, which other runs can be given.
        traces: Of the run.
        again: The comparison of that run with a second one, bit by bit.
        why_single: Why it is not trained in float64; empty if it is.
    """

    subject: Subject
    given: Given
    traces: list[Trace]
    again: TraceComparison
    why_single: str


def _plain(subject: Subject, division: Division) -> Experiment:
    """Return the experiment with nothing turned off."""
    return Experiment(division, reproducible=subject.settings.reproducible, watched=False)


def run_alone(subject: Subject, world: World) -> Alone:
    """Train in one process, twice, in float64 if that is possible."""
    experiment, why_single = _plain(subject, "one"), ""
    train = partial(perform_and_keep, experiment=experiment, world=world)
    outcome = attempt(lambda: train(subject, given=Given()))
    if isinstance(outcome, str):  # if float64 is not the reason, it fails again, and this is the error
        why_single, subject = outcome, replace(subject, double=False)
        outcome = train(subject, given=Given())
    traces, given = outcome
    subject = replace(subject, steps=tuple(given.samples))
    return Alone(subject, given, traces, compare(traces, train(subject, given=given)[0], EXACT), why_single)


Studied = tuple[Lab, Findings, Findings, Outcome]


def study_alone(lab: Lab, findings: Findings, again: TraceComparison, world: World) -> Studied:
    """Find the causes that a single process can find.

    Returns:
        The arguments; the causes why the result depends on the division of the batch; the plain run of the shares,
        which the ranks are compared with, empty if nothing makes two runs of one process the same.
    """
    division = Findings(lab.subject)
    if (base := causes.study_repetition(findings, lab, again, world)) is None:
        return lab, findings, division, ""
    # Such layers need the other ranks in forward, so one process cannot simulate them.
    if any("Sync" in kind for kind in lab.given.norms.values()):
        base |= {"batchnorm"}
    lab.base = base
    shares = causes.study_division(division, lab, world)
    lab.most = lab.num + causes.NUM_LATER
    if lab.subject.settings.reproducible:
        # Then one process divides the batch as the ranks do, so only these effects of a division matter.
        division.diagnoses = [one for one in division.diagnoses if one.cause in (Cause.RANDOM, Cause.BUFFERS)]
    return lab, findings, division, shares
