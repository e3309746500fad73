"""`verify`: train as one process and as ranks, compare the traces, and run the experiments that find the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cloudpickle

from lockstep.accelerator import check_count
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, LaunchTimeout, ModelMismatch
from lockstep.study.common import load, log, run_ranks
from lockstep.study.verify import causes
from lockstep.study.verify.causes import Cause, Diagnosis, Findings, Outcome, Row, attempt, tolerance_of
from lockstep.study.verify.fingerprint import EXACT, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import Division, Experiment, Given, Off, Subject
from lockstep.study.verify.reference_loop import perform, perform_and_keep
from lockstep.train.plan import check_batch
from lockstep.train.settings import Settings
from lockstep.train.task import Task

# How often one process repeats its run at most, and the seconds after which it begins no other.
REPETITIONS, ENOUGH_S = 3, 1.0

# How long the processes may take for each part of it. Ranks that wait for one another are reported much earlier.
TIMEOUT_S = 3600.0

# Called with a function, its arguments and a number of devices; see `run_ranks`.
Processes = Callable[..., list[Any]]


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
        remark: What else there is to report; may be empty.
    """

    subject: Subject
    same: bool
    comparison: TraceComparison | None
    repeatable: bool
    findings: tuple[Diagnosis, ...] = ()
    rows: tuple[Row, ...] = ()
    explained: bool = True
    why_single: str = ""
    remark: str = ""


def verify(
    task: Task | str, *, devices: int = 2, steps: int = 4, settings: Settings | None = None, quiet: bool = False
) -> Verification:
    """Train some steps of ``task`` as one process and as N ranks, and find out whether it is the same run.

    Starts processes of its own and blocks until they are done. If the runs differ, finds out why by turning one thing
    off at a time.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Ranks.
        steps: Steps to train; the last one is the last of the epoch if its batch is not full.
        settings: How to train; ``steps``, ``epochs`` and ``workers`` have no meaning here.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task or the devices cannot be used; names what to change.
        RankFailed: A rank failed.
        LaunchTimeout: The processes did not finish in time.
    """
    settings = settings or Settings()
    for name, value in (("devices", devices), ("steps", steps)):
        if value < 1:
            raise ConfigurationError(f"{name}={value} is not allowed.\nGive a whole number of at least 1.")
    check_count(devices)
    try:
        check_batch(load(task), settings, devices)
    except ConfigurationError as error:
        # A file that raises here, where it is no rank, may well run in one. The others: no such file, no task in it,
        # or a batch that cannot be divided.
        if error.__cause__ is None:
            raise
    # The form of the task that every run can make a fresh copy of.
    subject = Subject(task if isinstance(task, str) else cloudpickle.dumps(task), settings, devices, steps)
    processes = partial(run_ranks, timeout_s=TIMEOUT_S)
    return diagnose(subject, processes, (lambda _: None) if quiet else log)


def diagnose(subject: Subject, processes: Processes, report: Callable[[str], None]) -> Verification:
    """Compare one process with the ranks, and find what makes them differ.

    Args:
        subject: What is examined.
        processes: Starts one process, or as many as there are ranks.
        report: Called with what is being done.
    """
    alone, on_ranks, remark = _train(subject, processes, report)
    subject = alone.subject
    result = Verification(subject, False, None, alone.again.same, why_single=alone.why_single, remark=remark)
    if isinstance(on_ranks, Diagnosis):
        return replace(result, findings=(on_ranks,))
    comparison = compare(alone.traces, on_ranks, EXACT if subject.settings.reproducible else tolerance_of(subject))
    if comparison.same and alone.again.same:
        return replace(result, same=True, comparison=comparison)
    report("not the same; what one process can find out")
    study: AloneStudy = processes(study_alone, alone, devices=1)[0]
    findings = study.repetition
    # Where one process is never the same run twice, a comparison with ranks means nothing.
    if study.base is not None and not comparison.same:
        report(f"what {subject.num_devices} ranks can find out")
        light = replace(study, runs={})  # traces are large, and every rank gets a copy
        found = processes(run_counterparts, light, "ranks", devices=subject.num_devices)
        on_each = {key: _gather([one[key] for one in found]) for key in found[0]}
        findings.rows += study.division.rows
        causes.study_ranks(findings, study.base, study.runs, on_each, alone.traces)
        findings.diagnoses += [_with_fix(one, study.runs, on_each, findings) for one in study.division.diagnoses]
        findings.explained &= study.division.explained
    # Of each cause the first.
    diagnoses = tuple({one.cause: one for one in reversed(findings.diagnoses)}.values())[::-1]
    explained = findings.explained and bool(diagnoses)
    return replace(result, comparison=comparison, findings=diagnoses, rows=tuple(findings.rows), explained=explained)


def _gather(outcomes: list[Outcome]) -> Outcome:
    """Return the traces of all ranks, or why one of them failed."""
    failed = [found for found in outcomes if isinstance(found, str)]
    return failed[0] if failed else [trace for found in outcomes for trace in found if isinstance(trace, Trace)]


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
    report(f"{num} rank{'s' * (num > 1)}")
    try:
        found = processes(perform, subject, _plain(subject, "ranks"), Given(), devices=num)
        return alone, [trace for traces in found for trace in traces], remark
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, ModelMismatch):
            findings.add(Cause.MODEL, f"The ranks do not build the same model: {reason}")
        elif alone.traces[0].is_stream and isinstance(error, ConfigurationError):
            # What one process can train on and the ranks cannot is a stream that they do not read alike.
            findings.add(Cause.DATA, reason)
        if findings.diagnoses:
            return alone, findings.diagnoses[0], remark
        # The last batch of an epoch may leave a rank with one sample, or none, which batch norm cannot stand.
        first = tuple(range(len(subject.steps)))
        if subject.steps == first or isinstance(error, LaunchTimeout):
            raise
    report("the ranks cannot train on the epoch's last batch; without it")
    remark = f"Without the epoch's last batch, on which the ranks fail ({reason}): consider Task.drop_last."
    return _train(replace(subject, steps=first), processes, report, remark)


_FIXES = {"convert": "lockstep.SyncBatchNorm instead", "reproducible": "--reproducible {num} instead"}


def _with_fix(diagnosis: Diagnosis, alone: causes.Runs, ranks: causes.Runs, findings: Findings) -> Diagnosis:
    """Return ``diagnosis`` with what came of its fix, where that was tried."""
    name = "convert" if diagnosis.cause is Cause.BATCHNORM else "reproducible"
    if diagnosis.cause in (Cause.WEIGHTING, Cause.SUM) or name not in ranks:
        return diagnosis
    num, is_exact = findings.subject.num_devices, name == "reproducible"
    tolerance = EXACT if is_exact else tolerance_of(findings.subject)
    found = findings.compare(_FIXES[name].format(num=num), "one process, ranks", alone[name], ranks[name], tolerance)
    if found is None:
        return diagnosis
    if found.same:
        bits = ", to the bit" if is_exact else ""
        return replace(diagnosis, tried=f"Tried: with it, one process and the ranks are the same run{bits}.")
    if diagnosis.cause is Cause.RANDOM:
        tried = f"Tried: --reproducible {num} alone does not help."
        return replace(diagnosis, fix=causes.OWN_GENERATOR.format(num=num), tried=tried)
    return replace(diagnosis, tried=f"Tried: by itself it does not help, the runs {found}.")


# What the processes do: one by itself, and all ranks; first to compare, then to find causes.


@dataclass(frozen=True)
class Alone:
    """One process by itself.

    Attributes:
        subject: With the steps, and the precision in which the task can be trained.
        given: What others may be given of it.
        traces: Of the run.
        again: That run against a second one, bit by bit.
        why_single: Why it is not trained in float64; empty if it is.
    """

    subject: Subject
    given: Given
    traces: list[Trace]
    again: TraceComparison
    why_single: str


def _plain(subject: Subject, division: Division) -> Experiment:
    """Return the experiment in which nothing is turned off."""
    return Experiment(division, reproducible=subject.settings.reproducible, watched=False)


def run_alone(subject: Subject, world: World) -> Alone:
    """Train in one process, twice, in float64 if that is possible."""
    experiment, why_single = _plain(subject, "one"), ""
    found = attempt(perform_and_keep, subject, experiment, Given(), world)
    if isinstance(found, str):  # if it is not float64 that it cannot stand, it fails again, and this is the error
        why_single, subject = found, replace(subject, double=False)
        found = perform_and_keep(subject, experiment, Given(), world)
    traces, given = found
    subject = replace(subject, steps=tuple(given.samples))
    # More than one repetition where that takes no time, since chance may agree with itself.
    deadline = time.monotonic() + ENOUGH_S
    for _ in range(REPETITIONS):
        again = compare(traces, perform(subject, experiment, given, world), EXACT)
        if not again.same or time.monotonic() > deadline:
            break
    return Alone(subject, given, traces, again, why_single)


@dataclass(frozen=True)
class AloneStudy:
    """What one process finds out by itself.

    Attributes:
        repetition: What makes it another run the second time.
        given: With the factors of the shares.
        base: What is turned off from here on; None if nothing makes it the same run twice.
        division: What makes the result depend on how the batch is divided.
        off: What turns that off.
        runs: Those that stand for the ranks, and those that fixes are compared with.
    """

    repetition: Findings
    given: Given
    base: Off | None
    division: Findings
    off: Off = frozenset()
    runs: causes.Runs = field(default_factory=dict)


def study_alone(alone: Alone, world: World) -> AloneStudy:
    """Find what one process can find by itself, and make the runs that the ranks are compared with."""
    subject = alone.subject
    repetition, division = Findings(subject), Findings(subject)
    base = causes.study_repetition(repetition, alone.given, world, alone.again)
    if base is None:
        return AloneStudy(repetition, alone.given, None, division)
    # Such layers need the other ranks in forward, so one process cannot stand for them.
    if any("Sync" in kind for kind in alone.given.norms.values()):
        base |= {"batchnorm"}
    given, off = causes.study_division(division, alone.given, world, base)
    if subject.settings.reproducible:
        # Then one process divides the batch as the ranks do, so of what a division changes only this matters.
        division.diagnoses = [one for one in division.diagnoses if one.cause in (Cause.RANDOM, Cause.BUFFERS)]
    study = AloneStudy(repetition, given, base, division, off)
    return replace(study, runs=run_counterparts(study, "one", world))


def run_counterparts(study: AloneStudy, division: Division, world: World) -> causes.Runs:
    """Make the runs in which one process and the ranks should be the same: with things turned off, or a fix.

    Collective for ``ranks``: every rank of ``world``.
    """
    assert study.base is not None
    subject, on_ranks = study.division.subject, division == "ranks"
    experiments: dict[Off | str, Experiment] = {}
    for off in causes.variants(study.base):
        # What is a rank's alone can only be as in one process: data, rates, and the number of the rank.
        as_shares = Experiment("shares", off.union(causes.GIVEN) - {"place"})
        experiments[off] = Experiment("ranks", off) if on_ranks else as_shares
    base = study.base.union(causes.GIVEN, ("initial",))
    # SyncBatchNorm cannot run in one process that stands for the ranks, so there the whole batch is computed at once.
    if "batchnorm" in study.off:
        others = study.off - ({"batchnorm"} if on_ranks else {"batchnorm", "weights"})
        experiments["convert"] = Experiment(division, base | others, convert=on_ranks)
    if study.division.diagnoses:
        experiments["reproducible"] = Experiment(division, base, reproducible=subject.num_devices, watched=False)
    # Each once: several variants are the same for one process. In order, as the ranks must run the same ones.
    outcomes = {one: attempt(perform, subject, one, study.given, world) for one in dict.fromkeys(experiments.values())}
    return {name: outcomes[one] for name, one in experiments.items()}
